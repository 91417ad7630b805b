"""Deadlines are looked at when the first has passed."""

from __future__ import annotations

from dataclasses import dataclass

from whalepod.core.clock import Deadline
from whalepod.engine.expiry import Expiry


@dataclass(slots=True)
class _Clock:
    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def test_it_is_due_when_the_first_deadline_has_passed() -> None:
    clock, expiry = _Clock(), Expiry()
    assert not expiry.due
    assert expiry.remaining_s() is None
    deadlines = [Deadline.after(seconds, clock) for seconds in (9, 4, 6)]
    for deadline in deadlines:
        expiry.note(deadline)
    assert expiry.remaining_s() == 4
    clock.now_s = 3.9
    assert not expiry.due
    clock.now_s = 4
    assert expiry.due
    expiry.left(deadline for deadline in deadlines if not deadline.expired)
    assert not expiry.due
    assert expiry.remaining_s() == 2
    expiry.left(())
    assert expiry.remaining_s() is None
