"""Which server of a Redis Cluster has which slot, and what its redirections say.

MOVED 3999 10.0.0.7:6380      for good: note it, and learn the whole map again once for a burst
ASK   3999 10.0.0.7:6380      this once: ask there with ASKING, and note nothing
"""

from __future__ import annotations

import binascii
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .faults import ErrorReply
from .resp import Reply
from .settings import StoreAddress
from .store_keys import shard_tag

SLOTS = 16_384


def slot_of(key: bytes) -> int:
    """CRC-16/XMODEM of the key's tag, as the server computes it."""
    return binascii.crc_hqx(shard_tag(key), 0) % SLOTS


@dataclass(frozen=True, slots=True)
class Redirection:
    slot: int
    host: str
    """Empty: the host of the server that said so."""
    port: int
    ask: bool

    @classmethod
    def parse(cls, error: ErrorReply) -> Redirection | None:
        """None: this is no redirection. Total: the words come from a server."""
        if error.code not in ("MOVED", "ASK"):
            return None
        slot, _, where = error.message.partition(" ")
        host, _, port = where.rpartition(":")
        if not (slot.isdecimal() and port.isdecimal()) or int(slot) >= SLOTS or not 0 < int(port) < 65536:
            return None
        return cls(int(slot), host, int(port), ask=error.code == "ASK")


class SlotMap:
    """Thread-safe. Knows nothing at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: list[StoreAddress | None] = [None] * SLOTS

    def owner_of(self, key: bytes) -> StoreAddress | None:
        with self._lock:
            return self._owners[slot_of(key)]

    def note(self, slot: int, address: StoreAddress) -> None:
        with self._lock:
            self._owners[slot] = address

    def replace(self, reply: Reply, *, asked: StoreAddress) -> bool:
        """Take over a `CLUSTER SLOTS` reply of the server at `asked`. False, and nothing changes, if it is none."""
        owners: list[StoreAddress | None] = [None] * SLOTS
        if not isinstance(reply, list) or not reply:
            return False
        for row in reply:
            if not isinstance(row, list):
                return False
            match row:
                case [int(first), int(last), [bytes(host), int(port), *_], *_] if 0 <= first <= last < SLOTS:
                    owners[first : last + 1] = [at(asked, host.decode(errors="replace"), port)] * (last - first + 1)
                case _:
                    return False
        with self._lock:
            self._owners = owners
        return True

    def addresses(self) -> Sequence[StoreAddress]:
        """All owners, each once."""
        with self._lock:
            return list(dict.fromkeys(owner for owner in self._owners if owner is not None))


def at(known: StoreAddress, host: str, port: int) -> StoreAddress:
    """The same credentials elsewhere; an empty host means the same one."""
    return replace(known, host=host or known.host, port=port, path="")
