"""The only place that reads a clock. Everything else is handed a `Clock`, so that the simulation can own time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Source of time. `monotonic_s` is for durations and deadlines, `unix_ms` for timestamps that leave the process."""

    def monotonic_s(self) -> float: ...

    def unix_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()


def thread_cpu_s() -> float:
    """Seconds that the calling thread has spent on a core: what its own work costs, however busy the machine is."""
    return time.thread_time()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on a monotonic clock, in seconds. Passed down by value: nobody extends another's deadline."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        return cls(at_s=clock.monotonic_s() + seconds, clock=clock)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - self.clock.monotonic_s())

    @property
    def expired(self) -> bool:
        return self.clock.monotonic_s() >= self.at_s

    def earlier(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at_s, self.clock.monotonic_s() + seconds), self.clock)
