"""Which values were asked for in vain just now, so that they are not asked for again at once (`kvstore.md` §6)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from whalepod.core.clock import Clock

REMEMBERED_MAX = 1 << 14


class MissingKeys:
    """Thread-safe. A key that the store did not have stays missing for `life_s`, unless this process stores it."""

    def __init__(self, *, life_s: float, clock: Clock) -> None:
        self._life_s = life_s
        self._clock = clock
        self._lock = threading.Lock()
        self._missing_at_s: OrderedDict[bytes, float] = OrderedDict()
        self._stored_at_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            missing_at_s = self._missing_at_s.get(key)
        return missing_at_s is not None and self._clock.monotonic_s() - missing_at_s < self._life_s

    def before_first(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` stand before the first that is missing."""
        count = 0
        with self._lock:
            if self._missing_at_s.keys().isdisjoint(keys):
                return len(keys)
            oldest_s = self._clock.monotonic_s() - self._life_s
            for key in keys:
                missing_at_s = self._missing_at_s.get(key)
                if missing_at_s is not None and missing_at_s > oldest_s:
                    break
                count += 1
        return count

    def now_s(self) -> float:
        """When a question is asked, for `note`."""
        return self._clock.monotonic_s()

    def note(self, key: bytes, *, asked_at_s: float) -> None:
        """The store has answered that it does not have this; unless we have stored it since we asked."""
        with self._lock:
            if self._stored_at_s.get(key, float("-inf")) < asked_at_s:
                _remember(self._missing_at_s, (key,), self._clock.monotonic_s())

    def forget(self, keys: Sequence[bytes]) -> None:
        """They are there now."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            if not self._missing_at_s.keys().isdisjoint(keys):
                for key in keys:
                    self._missing_at_s.pop(key, None)
            _remember(self._stored_at_s, keys, now_s)


def _remember(times: OrderedDict[bytes, float], keys: Iterable[bytes], at_s: float) -> None:
    for key in keys:
        times[key] = at_s
        times.move_to_end(key)
    while len(times) > REMEMBERED_MAX:
        times.popitem(last=False)
