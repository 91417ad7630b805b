"""Deadlines on a clock that the test owns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from whalepod.core.clock import SYSTEM_CLOCK, Deadline


@dataclass
class SetClock:
    """Stands where it is put."""

    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(self.now_s * 1000)


def test_a_deadline_counts_down_and_expires_exactly_at_its_time() -> None:
    clock = SetClock()
    deadline = Deadline.after(5, clock)
    assert (deadline.remaining_s(), deadline.expired) == (5, False)
    clock.now_s = 104.5
    assert (deadline.remaining_s(), deadline.expired) == (0.5, False)
    clock.now_s = 105
    assert (deadline.remaining_s(), deadline.expired) == (0, True)


def test_a_deadline_long_past_has_nothing_left_rather_than_less() -> None:
    clock = SetClock()
    deadline = Deadline.after(1, clock)
    clock.now_s = 1000
    assert deadline.remaining_s() == 0


@pytest.mark.parametrize(("seconds", "at_s"), [(2, 102), (5, 105), (60, 105)])
def test_a_part_of_the_work_may_have_less_time_and_never_more(seconds: float, at_s: float) -> None:
    clock = SetClock()
    assert Deadline.after(5, clock).earlier(seconds) == Deadline(at_s, clock)


def test_the_systems_clock_moves_forward_and_knows_the_date() -> None:
    first, second = SYSTEM_CLOCK.monotonic_s(), SYSTEM_CLOCK.monotonic_s()
    assert second >= first
    assert 1_700_000_000_000 < SYSTEM_CLOCK.unix_ms() < 10_000_000_000_000, "milliseconds since 1970"
