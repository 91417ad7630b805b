"""An older attempt never gets past a newer one."""

from __future__ import annotations

import pytest

from whalepod.cluster.attempt_fence import AttemptFence
from whalepod.core.errors import StaleAttemptError
from whalepod.core.ids import RequestId

A, B, C = (RequestId(bytes([letter]) * 16) for letter in b"abc")


def test_newer_attempts_are_admitted_and_older_ones_refused() -> None:
    fence = AttemptFence()
    fence.admit_or_raise(A, 1)
    fence.admit_or_raise(A, 3)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(A, 2)


def test_a_repeated_attempt_is_refused() -> None:
    fence = AttemptFence()
    fence.admit_or_raise(A, 1)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(A, 1)


def test_memory_is_bounded_and_forgets_the_request_that_was_heard_of_longest_ago() -> None:
    fence = AttemptFence(remembered_max=2)
    fence.admit_or_raise(A, 1)
    fence.admit_or_raise(B, 1)
    fence.admit_or_raise(A, 2)
    fence.admit_or_raise(C, 1)
    fence.admit_or_raise(B, 1)
    with pytest.raises(StaleAttemptError):
        fence.admit_or_raise(C, 1)
