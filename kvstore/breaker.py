"""A circuit breaker for one server: pure bookkeeping, the owner asks and tells (`kvstore.md` §6).

Opens after a run of failures, or when more than half of the last second's outcomes failed; only a successful probe
closes it.
"""

from __future__ import annotations

from collections import deque

from whalepod.core.clock import Clock

WINDOW_S = 1.0
FAILED_SHARE_MAX = 0.5
OUTCOMES_MAX = 4096
"""Outcomes remembered; more in a second push out the oldest."""


class Breaker:
    """Not thread-safe: its owner holds a lock. `failures_max` failures in a row open it, or as many in a second if they
    are most of that second's outcomes."""

    def __init__(self, *, failures_max: int, clock: Clock) -> None:
        self._failures_max = failures_max
        self._clock = clock
        self._failures_in_row = 0
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=OUTCOMES_MAX)
        self._open = False

    @property
    def open(self) -> bool:
        return self._open

    def succeed(self) -> None:
        """An exchange went well. Does not close an open breaker: that exchange began before it opened."""
        self._failures_in_row = 0
        self._outcomes.append((self._clock.monotonic_s(), True))

    def fail(self) -> None:
        self._failures_in_row += 1
        now_s = self._clock.monotonic_s()
        self._outcomes.append((now_s, False))
        recent = [ok for at_s, ok in self._outcomes if now_s - at_s <= WINDOW_S]
        failed = recent.count(False)
        often = failed >= self._failures_max and failed > FAILED_SHARE_MAX * len(recent)
        self._open = self._open or often or self._failures_in_row >= self._failures_max

    def close(self) -> None:
        """A probe went well."""
        self._open = False
        self._failures_in_row = 0
        self._outcomes.clear()
