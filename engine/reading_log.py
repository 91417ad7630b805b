"""Says how far the reading of weights is: half a terabyte takes minutes, and silence looks like a hang."""

from __future__ import annotations

import logging

from whalepod.core.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
MIB = 1 << 20


class ReadingLog:
    """One reading, from its making to `finish`."""

    def __init__(self, *, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._what = what
        self._clock = clock
        self._started_s = self._said_s = clock.monotonic_s()
        self.read_bytes = 0
        self.lines = 0
        """Said so far."""

    def note(self, read: int, total: int) -> None:
        """`read` of `total` bytes of the files have been read."""
        self.read_bytes = read
        now_s = self._clock.monotonic_s()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            self.lines += 1
            left_s = (now_s - self._started_s) * (total - read) / max(1, read)
            log.info("weights of %s: %d of %d MiB, about %.0f s left", self._what, read // MIB, total // MIB, left_s)

    def finish(self) -> None:
        seconds = self._clock.monotonic_s() - self._started_s
        self.lines += 1
        log.info("weights of %s: %.1f MiB in %.1f s", self._what, self.read_bytes / MIB, seconds)
