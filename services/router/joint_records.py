"""A table of records by key in joint memory: bounded, without an owner, and never to be cleaned up.

Keys are spread over sets of a few places. A full set gives its oldest record away that is in no use: all that is kept
in such tables may be forgotten. So a process that dies as it writes leaves one odd record behind, and no broken table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from .joint_memory import JointMemory

KEY_BYTES: Final = 16
WAYS: Final = 16
"""Places in a set."""
_STAMPS: Final = struct.Struct(f"={WAYS}d")
_STAMP: Final = struct.Struct("=d")


class KeyedRecords:
    """A set: its keys, then when each was last stamped (monotonic seconds), then its records."""

    def __init__(self, memory: JointMemory, *, records: int, record_bytes: int) -> None:
        """`records`: at most so many, a multiple of WAYS."""
        self._memory = memory.bytes
        self._sets = records // WAYS
        self._record_bytes = record_bytes
        self._set_bytes = WAYS * (KEY_BYTES + _STAMP.size + record_bytes)
        self._stamps_at = WAYS * KEY_BYTES
        self._records_at = WAYS * (KEY_BYTES + _STAMP.size)
        self._at = memory.take(self._sets * self._set_bytes)

    def find(self, key: bytes) -> int | None:
        """Where the record of a key of KEY_BYTES lies. It may be another's as soon as others may write."""
        start = self._start(key)
        at = self._memory.find(key, start, start + WAYS * KEY_BYTES)
        while at >= 0:
            way, odd = divmod(at - start, KEY_BYTES)
            if not odd:
                return self._record(start, way)
            at = self._memory.find(key, at + 1, start + WAYS * KEY_BYTES)
        return None

    def put(self, key: bytes, *, now_s: float, in_use: Callable[[int], bool] = lambda _: False) -> tuple[int, bool]:
        """Where the record of the key lies, stamped now, and whether it is new: then it holds anything. `in_use`: of
        the record there; it is given away only for want of others."""
        start = self._start(key)
        found = self.find(key)
        if found is not None:
            way = (found - start - self._records_at) // self._record_bytes
        else:
            stamps = _STAMPS.unpack_from(self._memory, start + self._stamps_at)  # 0: never used
            way = min(range(WAYS), key=lambda way: (in_use(self._record(start, way)), stamps[way]))
            self._memory[start + way * KEY_BYTES : start + (way + 1) * KEY_BYTES] = key
        _STAMP.pack_into(self._memory, start + self._stamps_at + way * _STAMP.size, now_s)
        return self._record(start, way), found is None

    def _start(self, key: bytes) -> int:
        assert len(key) == KEY_BYTES
        return self._at + int.from_bytes(key[:4], "little") % self._sets * self._set_bytes

    def _record(self, start: int, way: int) -> int:
        return start + self._records_at + way * self._record_bytes
