"""Ranks that take no new work, as one process of a router has heard it: one that is started again knows it too."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

from whalepod.core.clock import Clock
from whalepod.core.ids import Incarnation, RankId

from .joint_memory import JointMemory
from .joint_records import KEY_BYTES, KeyedRecords

RANKS_MAX: Final = 4096
_INCARNATION: Final = struct.Struct("=Q")


class JointDrains:
    """By rank, which of its processes it was. Takes no lock: a rank is one number."""

    def __init__(self, memory: JointMemory) -> None:
        self._memory = memory.bytes
        self._clock: Clock = memory.clock
        self._records = KeyedRecords(memory, records=RANKS_MAX, record_bytes=_INCARNATION.size)

    def get(self, rank: RankId) -> Incarnation | None:
        at = self._records.find(_key(rank))
        return None if at is None else Incarnation(_INCARNATION.unpack_from(self._memory, at)[0])

    def put(self, rank: RankId, incarnation: Incarnation) -> None:
        at, _ = self._records.put(_key(rank), now_s=self._clock.monotonic_s())
        _INCARNATION.pack_into(self._memory, at, incarnation)


def _key(rank: RankId) -> bytes:
    return blake2b(rank.encode(), digest_size=KEY_BYTES).digest()
