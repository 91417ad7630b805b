"""Looks after the servers: counts, purges, quotas, and evicts leaf by leaf before a server must evict by itself.

One process at a time holds a server's lock, so several may run. Nothing depends on it: without it, expiry and the
server's own eviction go on. For one thread; every call may raise StoreFault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whalepod.core.clock import Clock

from .eviction import KEYS_A_MINUTE_MIN, KEYS_SHARE_A_MINUTE, bytes_by_owner, plan_eviction, plan_quotas
from .faults import FaultReason, StoreFault
from .purge_watch import EPOCH_KEY
from .server_check import parse_info
from .settings import StoreAddress
from .survey import StoreAdmin, StoredBlock

logger = logging.getLogger(__name__)

EVICT_HIGH = 0.85
EVICT_LOW = 0.80
LOCK_KEY = b"{whalepod:evictor}"
LOCK_MS = 15_000


@dataclass(frozen=True, slots=True)
class Stats:
    """Of all servers together. `owners`: bytes by owner tag."""

    blocks: int = 0
    block_bytes: int = 0
    snapshots: int = 0
    memory_bytes_used: int = 0
    memory_bytes_max: int = 0
    fragmentation: float = 0.0
    """The worst server's."""
    owners: Mapping[int, int] = field(default_factory=dict[int, int])


class Caretaker:
    """`quota_bytes`: what one owner may store on each server; None: no limit. `name` tells processes apart."""

    def __init__(self, addresses: Sequence[StoreAddress], *, name: str, quota_bytes: int | None, clock: Clock) -> None:
        self._admins = [StoreAdmin(address, clock=clock) for address in addresses]
        self._name = name.encode()
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._allowance = dict.fromkeys(addresses, float(KEYS_A_MINUTE_MIN))
        self._allowed_at_s = dict.fromkeys(addresses, clock.monotonic_s())
        self.removed = 0
        """Blocks removed by eviction and quotas so far."""

    def stats(self) -> Stats:
        """Reads every block's header once; later calls read only the new ones."""
        blocks = [block for admin in self._admins for block in admin.blocks()]
        infos = [parse_info(self._info(admin)) for admin in self._admins]
        snapshots = [keys for admin in self._admins for kind in (b"t:*", b"h:*") for keys in admin.scan(kind)]
        return Stats(
            blocks=len(blocks),
            block_bytes=sum(block.value_bytes for block in blocks),
            snapshots=sum(map(len, snapshots)),
            memory_bytes_used=sum(info.memory_bytes_used for info in infos),
            memory_bytes_max=sum(info.memory_bytes_max for info in infos),
            fragmentation=max((info.fragmentation for info in infos), default=0.0),
            owners=bytes_by_owner(blocks),
        )

    def purge(self, doomed: Callable[[StoredBlock], bool]) -> int:
        """Remove blocks, and make every node cache forget what it has; returns how many there were."""
        removed = 0
        for admin in self._admins:
            removed += admin.unlink(block.key for block in admin.blocks() if doomed(block))
            admin.ask([b"SET", EPOCH_KEY, b"%d" % self._clock.unix_ms()])
        return removed

    def tend(self, *, evict: bool) -> int:
        """One round of quotas and, if asked, eviction; returns how many blocks were removed."""
        removed = sum(self._tend(admin, evict=evict) for admin in self._admins)
        self.removed += removed
        return removed

    def close(self) -> None:
        for admin in self._admins:
            admin.close()

    def _tend(self, admin: StoreAdmin, *, evict: bool) -> int:
        if not self._leads(admin):
            return 0
        info = parse_info(self._info(admin))
        full = info.memory_bytes_max and info.memory_bytes_used > EVICT_HIGH * info.memory_bytes_max
        if self._quota_bytes is None and not (evict and full):
            return 0
        blocks = admin.blocks()
        keys_max = self._keys_allowed(admin.address, len(blocks))
        doomed = plan_quotas(blocks, quota_bytes=self._quota_bytes, keys_max=keys_max)
        if evict and full:
            gone = {block.key for block in doomed}
            excess = info.memory_bytes_used - int(EVICT_LOW * info.memory_bytes_max)
            excess -= sum(block.value_bytes for block in doomed)
            left = [block for block in blocks if block.key not in gone]
            doomed += plan_eviction(left, bytes_to_free=excess, keys_max=keys_max - len(doomed))
        self._allowance[admin.address] -= len(doomed)
        return admin.unlink(block.key for block in doomed)

    def _keys_allowed(self, address: StoreAddress, keys: int) -> int:
        """So many keys a minute, saved up for a minute at most."""
        now_s = self._clock.monotonic_s()
        rate = max(KEYS_A_MINUTE_MIN, keys * KEYS_SHARE_A_MINUTE) / 60
        earned = rate * (now_s - self._allowed_at_s[address])
        self._allowed_at_s[address] = now_s
        self._allowance[address] = min(60 * rate, self._allowance[address] + earned)
        return int(self._allowance[address])

    def _leads(self, admin: StoreAdmin) -> bool:
        """Whether this process looks after the server now."""
        taken, holder = admin.ask([b"SET", LOCK_KEY, self._name, b"NX", b"PX", b"%d" % LOCK_MS], [b"GET", LOCK_KEY])
        if holder == self._name and taken is None:
            admin.ask([b"PEXPIRE", LOCK_KEY, b"%d" % LOCK_MS])
        return holder == self._name

    def _info(self, admin: StoreAdmin) -> bytes:
        (reply,) = admin.ask([b"INFO"])
        if not isinstance(reply, bytes):
            raise StoreFault(FaultReason.UNAVAILABLE, f"INFO: {reply}")
        return reply


def owned_by(owners: Iterable[int]) -> Callable[[StoredBlock], bool]:
    wanted = set(owners)
    return lambda block: block.owner in wanted
