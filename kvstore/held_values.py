"""What a rank has published lately, kept in its own memory for whoever cannot get it from the store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from whalepod.core.clock import Clock

from .transport import ValueToWrite
from .value_format import BytesLike


@dataclass(frozen=True, slots=True)
class _Held:
    pieces: tuple[BytesLike, ...]
    bytes: int
    until_s: float


class HeldValues:
    """Thread-safe. Holds `bytes_max` of values, the newest, each for `life_s`. What it is given is not copied."""

    def __init__(self, *, bytes_max: int, life_s: float, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._life_s = life_s
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def keep(self, values: Iterable[ValueToWrite]) -> None:
        until_s = self._clock.monotonic_s() + self._life_s
        with self._lock:
            for value in values:
                self._drop(value.key)
                self._held[value.key] = _Held(value.pieces, value.value_bytes, until_s)
                self._bytes += value.value_bytes
            self._drop_old()

    def find(self, key: bytes) -> tuple[BytesLike, ...] | None:
        """The value's pieces."""
        with self._lock:
            self._drop_old()
            held = self._held.get(key)
            return held.pieces if held is not None else None

    def drop(self, keys: Iterable[bytes]) -> int:
        """How many of them were there."""
        with self._lock:
            return sum(self._drop(key) for key in keys)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> bool:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.bytes
        return held is not None

    def _drop_old(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._held:
            key, oldest = next(iter(self._held.items()))
            if oldest.until_s > now_s and self._bytes <= self._bytes_max:
                return
            self._drop(key)
