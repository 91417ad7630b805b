"""Snapshots that this rank has left in the store, until nobody can want them any more.

Who reads a hand-off unlinks it. A reader that is killed does not, and a hand-off's life in the store is the longest
there is, so that eviction takes it last: so who wrote it unlinks it too, when its request's time is over. What was left
for a request to go on from elsewhere is unlinked when it must have gone on, or its router has died, too. Of one that is
gone by then, that costs one word of a command.
"""

from __future__ import annotations

import heapq

from whalepod.core.clock import Clock, Deadline

REMEMBERED_MAX = 1 << 16
"""Of more, the caretaker of the servers takes care (`kvstore/caretaker.py`)."""


class LeftSnapshots:
    """For one thread, or under its owner's lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_end: list[tuple[float, bytes]] = []

    def note(self, key: bytes, until: Deadline) -> None:
        """It may be in the store, and is of use until then."""
        if len(self._by_end) < REMEMBERED_MAX:
            heapq.heappush(self._by_end, (until.at_s, key))

    @property
    def due(self) -> bool:
        return bool(self._by_end) and self._by_end[0][0] <= self._clock.monotonic_s()

    def take_due(self) -> list[bytes]:
        """Keys to unlink now, each once."""
        keys: list[bytes] = []
        while self.due:
            keys.append(heapq.heappop(self._by_end)[1])
        return keys

    def remaining_s(self) -> float | None:
        """Until one is due; None: there is none."""
        return max(0.0, self._by_end[0][0] - self._clock.monotonic_s()) if self._by_end else None
