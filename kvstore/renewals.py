"""Which blocks' lives this process has renewed lately, so that a hot prefix is not renewed on every hit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from whalepod.core.block_keys import BlockHash, BlockKey
from whalepod.core.clock import Clock

REMEMBERED_MAX = 1 << 16
"""Past this the longest unrenewed are forgotten, and renewed once too often."""


NEVER_S = float("-inf")


class Renewals:
    """Thread-safe memory of the last renewal of each block. Wrong answers cost one small command."""

    def __init__(self, *, interval_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._renewed_at_s: OrderedDict[BlockHash, float] = OrderedDict()

    def due(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Those of `keys` not renewed within the interval."""
        oldest_s = self._clock.monotonic_s() - self._interval_s
        with self._lock:
            renewed_at_s = self._renewed_at_s
            return [key for key in keys if renewed_at_s.get(key.hash, NEVER_S) <= oldest_s]

    def note(self, keys: Iterable[BlockKey]) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            for key in keys:
                self._renewed_at_s[key.hash] = now_s
                self._renewed_at_s.move_to_end(key.hash)
            while len(self._renewed_at_s) > REMEMBERED_MAX:
                self._renewed_at_s.popitem(last=False)
