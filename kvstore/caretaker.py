"""Looks after the servers: counts, purges, quotas, and evicts leaf by leaf before a server must evict by itself.

One process at a time holds a server's lock, so several may run. Nothing depends on it: without it, expiry and the
server's own eviction go on. The primaries of a Redis Cluster are found anew for every round. For one thread; every call
may raise StoreFault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whalepod.core.clock import Clock

from . import caretaker_metrics as metrics
from .eviction import KEYS_A_MINUTE_MIN, KEYS_SHARE_A_MINUTE, bytes_by_owner, plan_eviction, plan_quotas
from .faults import FaultReason, StoreFault
from .purge_watch import EPOCH_KEY
from .server_check import parse_info
from .settings import RETENTION_S_MAX, StoreAddress
from .store_servers import StoreServers
from .survey import StoreAdmin, StoredBlock

logger = logging.getLogger(__name__)

EVICT_HIGH = 0.85
EVICT_LOW = 0.80
LOCK_KEY = b"{whalepod:evictor}"
LOCK_MS = 15_000
HANDOFF_AGE_S_MAX = 3600.0
"""Who leaves a hand-off, and who reads it, unlinks it within its request's time. One that is older lost both."""
HANDOFF_SWEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Of all servers together. `owners`: bytes by owner tag."""

    blocks: int = 0
    block_bytes: int = 0
    images: int = 0
    """Of which the rows are stored."""
    image_bytes: int = 0
    snapshots: int = 0
    memory_bytes_used: int = 0
    memory_bytes_max: int = 0
    fragmentation: float = 0.0
    """The worst server's."""
    owners: Mapping[int, int] = field(default_factory=dict[int, int])


class Caretaker:
    """`quota_bytes`: what one owner may store on each server; None: no limit. `name` tells processes apart."""

    def __init__(
        self,
        addresses: Sequence[StoreAddress],
        *,
        name: str,
        quota_bytes: int | None,
        clock: Clock,
        cluster: bool = False,
    ) -> None:
        """`cluster`: the addresses are nodes of one Redis Cluster, and its primaries are looked after."""
        self._servers = StoreServers(addresses, cluster=cluster, clock=clock)
        self._name = name.encode()
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._allowance: dict[StoreAddress, float] = {}
        self._allowed_at_s: dict[StoreAddress, float] = {}
        self._swept_at_s: dict[StoreAddress, float] = {}
        self._lag_bytes: dict[StoreAddress, int] = {}
        self.removed = 0
        """Blocks removed by eviction and quotas so far."""

    def stats(self) -> Stats:
        """Reads every block's header once; later calls read only the new ones."""
        admins = self._servers.all()
        values = [value for admin in admins for value in admin.blocks()]
        blocks = [value for value in values if not value.is_image]
        images = [value for value in values if value.is_image]
        infos = [parse_info(self._info(admin)) for admin in admins]
        snapshots = [keys for admin in admins for kind in (b"t:*", b"h:*", b"c:*") for keys in admin.scan(kind)]
        return Stats(
            blocks=len(blocks),
            block_bytes=sum(block.value_bytes for block in blocks),
            images=len(images),
            image_bytes=sum(image.value_bytes for image in images),
            snapshots=sum(map(len, snapshots)),
            memory_bytes_used=sum(info.memory_bytes_used for info in infos),
            memory_bytes_max=sum(info.memory_bytes_max for info in infos),
            fragmentation=max((info.fragmentation for info in infos), default=0.0),
            owners=bytes_by_owner(values),
        )

    def show(self) -> None:
        """Tell operators what `stats` says."""
        stats = self.stats()
        for kind, count in (("block", stats.blocks), ("image", stats.images), ("snapshot", stats.snapshots)):
            metrics.STORED_VALUES.labels(kind).set(count)
        metrics.STORED_BYTES.labels("block").set(stats.block_bytes)
        metrics.STORED_BYTES.labels("image").set(stats.image_bytes)
        metrics.MEMORY_BYTES.set(stats.memory_bytes_used)
        metrics.MEMORY_MAX_BYTES.set(stats.memory_bytes_max)
        metrics.FRAGMENTATION.set(stats.fragmentation)
        metrics.show_owners(stats.owners)

    def blocks(self) -> list[StoredBlock]:
        """All of them and the rows of images, as their headers say."""
        return [block for admin in self._servers.all() for block in admin.blocks()]

    def purge(self, doomed: Callable[[StoredBlock], bool]) -> int:
        """Remove blocks and rows of images, then make every node cache forget what it has; returns how many there were.
        A server that does not answer is left out, and said to be at the end."""
        removed, told, fault = 0, False, None
        admins = self._servers.all()
        for admin in admins:
            try:
                removed += admin.unlink(block.key for block in admin.blocks() if doomed(block))
            except StoreFault as lost:
                fault = lost
        # Only now: a cache that forgets sooner may read a block again from a server that still has it.
        for admin in admins:
            try:
                told |= self._tell_caches(admin)
            except StoreFault as lost:
                fault = lost
        if fault is None and admins and not told:
            fault = StoreFault(FaultReason.UNAVAILABLE, "no server takes the epoch of a purge")
        if fault is not None:
            raise fault
        return removed

    def tend(self, *, evict: bool) -> int:
        """One round of quotas, old hand-offs and, if asked, eviction; returns how many blocks were removed. A server
        that does not answer is left out, and said to be at the end."""
        removed, fault = 0, None
        admins = self._servers.all()
        for admin in admins:
            try:
                removed += self._tend(admin, [other for other in admins if other is not admin], evict=evict)
            except StoreFault as lost:
                fault = lost
        self.removed += removed
        metrics.EVICTOR_LAG_BYTES.set(sum(self._lag_bytes.values()))
        if fault is not None:
            raise fault
        return removed

    def close(self) -> None:
        self._servers.close()

    def _tell_caches(self, admin: StoreAdmin) -> bool:
        """Whether the server has taken the epoch: of a cluster, the one that has its slot does."""
        (reply,) = admin.ask([b"SET", EPOCH_KEY, b"%d" % self._clock.unix_ms()])
        return reply == b"OK"

    def _tend(self, admin: StoreAdmin, others: Sequence[StoreAdmin], *, evict: bool) -> int:
        if not self._leads(admin):
            return 0
        self._sweep_handoffs(admin)
        info = parse_info(self._info(admin))
        self._lag_bytes[admin.address] = 0
        full = info.memory_bytes_max and info.memory_bytes_used > EVICT_HIGH * info.memory_bytes_max
        if self._quota_bytes is None and not (evict and full):
            return 0
        blocks = admin.blocks()
        keys_max = self._keys_allowed(admin.address, len(blocks))
        above_quota = plan_quotas(blocks, quota_bytes=self._quota_bytes, keys_max=keys_max)
        evicted: list[StoredBlock] = []
        if evict and full:
            gone = {block.key for block in above_quota}
            excess = info.memory_bytes_used - int(EVICT_LOW * info.memory_bytes_max)
            excess -= sum(block.value_bytes for block in above_quota)
            left = [block for block in blocks if block.key not in gone]
            evicted = plan_eviction(
                left,
                bytes_to_free=excess,
                keys_max=keys_max - len(above_quota),
                # A run of 16 blocks is on one server, and the next of its chain may be on another.
                parents_elsewhere={block.parent for other in others for block in other.blocks()},
            )
            self._lag_bytes[admin.address] = max(0, excess - sum(block.value_bytes for block in evicted))
        self._allowance[admin.address] -= len(above_quota) + len(evicted)
        return self._removed(admin, above_quota, "quota") + self._removed(admin, evicted, "evicted")

    def _removed(self, admin: StoreAdmin, doomed: Sequence[StoredBlock], reason: str) -> int:
        removed = admin.unlink(block.key for block in doomed)
        metrics.REMOVED.labels(reason).inc(removed)
        for block in doomed:
            age_s = (self._clock.unix_ms() - block.created_unix_ms) / 1000
            metrics.REMOVED_AGE_SECONDS.labels(reason).observe(max(0.0, age_s))
        return removed

    def _keys_allowed(self, address: StoreAddress, keys: int) -> int:
        """So many keys a minute, saved up for a minute at most."""
        now_s = self._clock.monotonic_s()
        rate = max(KEYS_A_MINUTE_MIN, keys * KEYS_SHARE_A_MINUTE) / 60
        earned = rate * (now_s - self._allowed_at_s.get(address, now_s))
        self._allowed_at_s[address] = now_s
        self._allowance[address] = min(60 * rate, self._allowance.get(address, float(KEYS_A_MINUTE_MIN)) + earned)
        return int(self._allowance[address])

    def _sweep_handoffs(self, admin: StoreAdmin) -> None:
        """Remove what nobody has read for so long that nobody will."""
        now_s = self._clock.monotonic_s()
        if now_s - self._swept_at_s.get(admin.address, float("-inf")) < HANDOFF_SWEEP_S:
            return
        self._swept_at_s[admin.address] = now_s
        left_ms_min = 1000 * (RETENTION_S_MAX - HANDOFF_AGE_S_MAX)
        for keys in admin.scan(b"h:*"):
            lives = admin.ask(*([b"PTTL", key] for key in keys))
            old = [
                key for key, left in zip(keys, lives, strict=True) if isinstance(left, int) and 0 <= left < left_ms_min
            ]
            if admin.unlink(old):
                logger.info("store %s: removed %d hand-offs that nobody has read", admin.address, len(old))

    def _leads(self, admin: StoreAdmin) -> bool:
        """Whether this process looks after the server now."""
        lock = self._servers.own_key(LOCK_KEY, admin)
        taken, holder = admin.ask([b"SET", lock, self._name, b"NX", b"PX", b"%d" % LOCK_MS], [b"GET", lock])
        if holder == self._name and taken is None:
            admin.ask([b"PEXPIRE", lock, b"%d" % LOCK_MS])
        return holder == self._name

    def _info(self, admin: StoreAdmin) -> bytes:
        (reply,) = admin.ask([b"INFO"])
        if not isinstance(reply, bytes):
            raise StoreFault(FaultReason.UNAVAILABLE, f"INFO: {reply}")
        return reply


def owned_by(owners: Iterable[int]) -> Callable[[StoredBlock], bool]:
    wanted = set(owners)
    return lambda block: block.owner in wanted
