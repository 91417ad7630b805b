"""A gate that is closed, or that does not offer a fidelity, refuses; what strangers send leaves no trace."""

from __future__ import annotations

import pytest

from whalepod.cluster.ticket_gate import TicketGate, claimed_identity
from whalepod.cluster.tickets import CLOCK_SKEW_MS, pack_ids, sign_ticket
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError, InvalidFieldError, UnavailableError
from whalepod.engine.interface import Fidelity, Work
from whalepod.rpc.common.v1 import common_pb2

SECRET, OTHER = ClusterSecret(b"s" * 16), ClusterSecret(b"t" * 16)
ID = b"sixteen bytes id"


def gate(
    *, fidelities: tuple[Fidelity, ...] = (Fidelity.FAST, Fidelity.EXACT), clock: Clock = SYSTEM_CLOCK
) -> TicketGate:
    return TicketGate(
        rank_id="decode-0",
        work=Work.GENERATE,
        model_name="whale",
        namespace=b"n" * 16,
        fidelities=fidelities,
        secret=SECRET,
        clock=clock,
    )


def ticket(
    *, secret: ClusterSecret = SECRET, prefill: str = "", attempt: int = 1, now_ms: int | None = None
) -> common_pb2.SignedTicket:
    now_ms = SYSTEM_CLOCK.unix_ms() if now_ms is None else now_ms
    soon = now_ms + 60_000
    return sign_ticket(
        common_pb2.Ticket(
            request_id=ID,
            attempt=attempt,
            model="whale",
            fidelity=common_pb2.FIDELITY_EXACT,
            prompt_ids=pack_ids([5, 6]),
            decode_rank="decode-0",
            prefill_rank=prefill,
            deadline_unix_ms=soon,
            expires_unix_ms=soon,
            signed_unix_ms=now_ms,
        ),
        secret,
    )


def test_a_good_ticket_becomes_work_that_waits_only_for_a_prefill_rank_it_names() -> None:
    alone = gate().admit_or_raise(ticket())
    assert (alone.work, alone.await_handoff, list(alone.prompt_ids)) == (Work.GENERATE, False, [5, 6])
    assert gate().admit_or_raise(ticket(prefill="prefill-0")).await_handoff


def test_a_closed_gate_refuses_as_worth_trying_elsewhere_and_forgets_the_attempt() -> None:
    door = gate()
    door.closed = True
    with pytest.raises(UnavailableError):
        door.admit_or_raise(ticket())
    door.closed = False
    door.admit_or_raise(ticket())


def test_a_forged_newer_attempt_does_not_fence_off_the_true_one() -> None:
    door = gate()
    with pytest.raises(AuthenticationError):
        door.admit_or_raise(ticket(secret=OTHER, attempt=9))
    door.admit_or_raise(ticket(attempt=1))


def test_a_fidelity_that_is_not_offered_is_the_requests_fault() -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        gate(fidelities=(Fidelity.FAST,)).admit_or_raise(ticket())
    assert refusal.value.field == "fidelity"


def test_a_refusal_can_be_addressed_even_if_the_ticket_is_forged() -> None:
    assert claimed_identity(ticket(secret=OTHER, attempt=4)) == (ID, 4)
    assert claimed_identity(common_pb2.SignedTicket(ticket=b"\xff\xff")) is None


class _SetClock:
    """Stands where it is put."""

    def __init__(self, unix_ms: int) -> None:
        self.at_ms = unix_ms

    def unix_ms(self) -> int:
        return self.at_ms

    def monotonic_s(self) -> float:
        return self.at_ms / 1000


def test_a_ticket_of_a_request_that_has_ended_is_not_taken_again_after_a_restart() -> None:
    clock = _SetClock(1_000_000_000)
    used = ticket(now_ms=clock.at_ms)
    gate(clock=clock).admit_or_raise(used)
    clock.at_ms += 20_000
    restarted = gate(clock=clock)
    with pytest.raises(UnavailableError):
        restarted.admit_or_raise(used)
    restarted.admit_or_raise(ticket(now_ms=clock.at_ms, attempt=2))
    restarted.admit_or_raise(ticket(now_ms=clock.at_ms - CLOCK_SKEW_MS, attempt=3))
