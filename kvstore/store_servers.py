"""The servers that are looked after: those of the settings, or the primaries that a Redis Cluster has at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from whalepod.core.clock import Clock

from .faults import FaultReason, StoreFault
from .settings import StoreAddress
from .slot_map import SlotMap
from .survey import StoreAdmin


class StoreServers:
    """For one thread. Every call may raise StoreFault."""

    def __init__(self, addresses: Sequence[StoreAddress], *, cluster: bool, clock: Clock) -> None:
        self._seeds = tuple(addresses)
        self._clock = clock
        self._admins = {address: StoreAdmin(address, clock=clock) for address in addresses}
        self._slots = SlotMap() if cluster else None

    def all(self) -> Sequence[StoreAdmin]:
        """Every server, or every primary that has slots now."""
        if self._slots is None:
            return list(self._admins.values())
        self._learn(self._slots)
        primaries = self._slots.addresses()
        for address in primaries:
            if address not in self._admins:
                self._admins[address] = StoreAdmin(address, clock=self._clock)
        for address in [address for address in self._admins if address not in primaries and address not in self._seeds]:
            self._admins.pop(address).close()
        return [self._admins[address] for address in primaries]

    def own_key(self, name: bytes, admin: StoreAdmin) -> bytes:
        """A name for something that every server has one of: in a cluster, the first `{…:n}` in one of its slots."""
        if self._slots is None:
            return name
        names = (b"%b:%d}" % (name.removesuffix(b"}"), number) for number in count())
        return next(key for key in names if self._slots.owner_of(key) == admin.address)

    def close(self) -> None:
        for admin in self._admins.values():
            admin.close()

    def _learn(self, slots: SlotMap) -> None:
        fault = StoreFault(FaultReason.UNAVAILABLE, "no node tells who has which slot")
        for admin in list(self._admins.values()):
            try:
                (reply,) = admin.ask([b"CLUSTER", b"SLOTS"])
            except StoreFault as lost:
                fault = lost
                continue
            if slots.replace(reply, asked=admin.address):
                return
        raise fault
