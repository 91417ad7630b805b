from __future__ import annotations

from dataclasses import dataclass

from whalepod.kvstore.breaker import Breaker


@dataclass
class HandClock:
    """Moves when the test says so."""

    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def breaker(clock: HandClock | None = None) -> Breaker:
    return Breaker(failures_max=5, clock=clock or HandClock())


def test_failures_in_a_row_open_it() -> None:
    clock = HandClock()
    subject = breaker(clock)
    for _ in range(4):
        subject.fail()
        clock.now_s += 10
    assert not subject.open
    subject.fail()
    assert subject.open


def test_a_success_between_failures_starts_the_row_again() -> None:
    clock = HandClock()
    subject = breaker(clock)
    for _ in range(20):
        for _ in range(4):
            subject.fail()
            clock.now_s += 2
        subject.succeed()
    assert not subject.open


def test_a_second_in_which_most_fail_opens_it() -> None:
    subject = breaker()
    for _ in range(5):
        subject.succeed()
        subject.fail()
    assert not subject.open  # half is not most
    subject.fail()
    assert subject.open


def test_a_bad_second_is_forgotten_after_a_second() -> None:
    clock = HandClock()
    subject = breaker(clock)
    for _ in range(4):
        subject.fail()
        subject.succeed()
    clock.now_s += 1.5
    subject.fail()
    assert not subject.open


def test_only_a_probe_closes_it_and_the_past_is_then_forgotten() -> None:
    subject = breaker()
    for _ in range(5):
        subject.fail()
    subject.succeed()
    assert subject.open
    subject.close()
    assert not subject.open
    for _ in range(4):
        subject.fail()
    assert not subject.open
