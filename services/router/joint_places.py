"""Where conversations have been last, for all processes of a router: a client's next turn comes to any of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Clock
from whalepod.core.ids import RankId

from .joint_memory import JointMemory
from .joint_records import KEY_BYTES, KeyedRecords

PLACES_MAX: Final = 65_536
NAME_BYTES: Final = 63
"""A rank with a longer name is not remembered."""


class JointPlaces:
    """Takes no lock: who reads while another writes finds a rank that does not exist, at worst, and goes elsewhere."""

    def __init__(self, memory: JointMemory) -> None:
        self._memory = memory.bytes
        self._clock: Clock = memory.clock
        self._records = KeyedRecords(memory, records=PLACES_MAX, record_bytes=NAME_BYTES + 1)

    def get(self, key: tuple[str, str] | BlockHash) -> RankId | None:
        at = self._records.find(_name_of(key))
        if at is None:
            return None
        length = min(NAME_BYTES, self._memory[at])
        return RankId(self._memory[at + 1 : at + 1 + length].decode(errors="replace"))

    def put(self, key: tuple[str, str] | BlockHash, rank: RankId) -> None:
        name = rank.encode()
        if len(name) <= NAME_BYTES:
            at, _ = self._records.put(_name_of(key), now_s=self._clock.monotonic_s())
            self._memory[at : at + 1 + len(name)] = bytes((len(name),)) + name


def _name_of(key: tuple[str, str] | BlockHash) -> bytes:
    """A block's name begins with as many random bytes."""
    if isinstance(key, bytes):
        return key[:KEY_BYTES].ljust(KEY_BYTES, b"\0")
    tenant, session = (part.encode("utf-8", "surrogatepass") for part in key)
    return blake2b(len(tenant).to_bytes(4, "little") + tenant + session, digest_size=KEY_BYTES).digest()
