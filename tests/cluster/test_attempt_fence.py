"""An older attempt never gets past a newer one, and none gets through twice."""

from __future__ import annotations

from random import Random

import pytest

from whalepod.cluster.attempt_fence import AttemptFence
from whalepod.core.errors import ServingError, StaleAttemptError, UnavailableError
from whalepod.core.ids import RequestId

A, B, C = (RequestId(bytes([letter]) * 16) for letter in b"abc")
START_MS = 1_000_000


def fence_of(**options: int) -> AttemptFence:
    return AttemptFence(since_unix_ms=START_MS, **options)


def test_newer_attempts_are_admitted_and_older_ones_refused() -> None:
    fence = fence_of()
    fence.admit_or_raise(A, 1, signed_unix_ms=START_MS)
    fence.admit_or_raise(A, 3, signed_unix_ms=START_MS)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(A, 2, signed_unix_ms=START_MS)


def test_a_repeated_attempt_is_refused() -> None:
    fence = fence_of()
    fence.admit_or_raise(A, 1, signed_unix_ms=START_MS)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(A, 1, signed_unix_ms=START_MS)


def test_what_was_signed_before_the_rank_started_is_refused_as_worth_a_new_ticket() -> None:
    fence = fence_of()
    with pytest.raises(UnavailableError):
        fence.admit_or_raise(A, 1, signed_unix_ms=START_MS - 1)
    fence.admit_or_raise(A, 1, signed_unix_ms=START_MS)


def test_a_router_of_before_which_does_not_say_when_it_signs_is_served() -> None:
    fence_of().admit_or_raise(A, 1, signed_unix_ms=0)


def test_memory_is_bounded_and_what_is_forgotten_does_not_get_through_again() -> None:
    fence = fence_of(remembered_max=2)
    fence.admit_or_raise(A, 1, signed_unix_ms=START_MS + 1)
    fence.admit_or_raise(B, 1, signed_unix_ms=START_MS + 2)
    fence.admit_or_raise(A, 2, signed_unix_ms=START_MS + 3)
    fence.admit_or_raise(C, 1, signed_unix_ms=START_MS + 4)
    with pytest.raises(UnavailableError):
        fence.admit_or_raise(B, 1, signed_unix_ms=START_MS + 2)
    fence.admit_or_raise(B, 2, signed_unix_ms=START_MS + 5)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(C, 1, signed_unix_ms=START_MS + 4)


@pytest.mark.parametrize("seed", range(20))
def test_however_tickets_are_replayed_across_restarts_each_is_used_once(seed: int) -> None:
    rng, now_ms, used = Random(seed), START_MS, set[tuple[RequestId, int]]()
    fence = AttemptFence(since_unix_ms=now_ms, remembered_max=8)
    sent: list[tuple[RequestId, int, int]] = []
    fresh = 0
    for number in range(400):
        now_ms += rng.randrange(1, 4)
        if rng.random() < 0.02:  # restarted; it takes longer than clocks may differ
            now_ms += 1
            fence = AttemptFence(since_unix_ms=now_ms, remembered_max=8)
        replay = bool(sent) and rng.random() < 0.5
        ticket = rng.choice(sent) if replay else (RequestId(number.to_bytes(16)), rng.randrange(1, 3), now_ms)
        sent.append(ticket)
        request_id, attempt, signed_ms = ticket
        try:
            fence.admit_or_raise(request_id, attempt, signed_unix_ms=signed_ms)
        except ServingError:
            assert replay, "a new ticket was refused"
            continue
        assert (request_id, attempt) not in used, "a ticket was used twice"
        used.add((request_id, attempt))
        fresh += 1
    assert fresh > 100
