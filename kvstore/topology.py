"""Which servers there are, and which of them has a key: fixed by the settings, or told by a Redis Cluster.

A cluster's map is learnt from any node that answers. A redirection corrects it at once and has it learnt again, once
for a burst; so does a node that is down, because a dead node cannot say who has taken over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from random import Random

import xxhash

from whalepod.core.clock import Clock, Deadline

from .redis_shard import Greeting, Lane, Shard
from .resp import Reply, RespConnection, command
from .settings import StoreAddress, StoreSettings
from .slot_map import Redirection, SlotMap, at
from .store_keys import shard_tag

LEARN_INTERVAL_S = 0.2
"""A map is not learnt more often, however many redirections there are."""
LOOK_AROUND_S = 0.5
"""How often a cluster with a dead node is asked whether another has taken over."""


class Topology:
    """Thread-safe."""

    def __init__(self, settings: StoreSettings, *, jitter: Random, clock: Clock, greet: Greeting | None = None) -> None:
        self._settings = settings
        self._greet = greet
        self._jitter = jitter
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address = {address: self._new_shard(address) for address in settings.addresses}
        self._shards = tuple(self._by_address.values())
        self._slots = SlotMap()
        self._learning = threading.Lock()
        self._learnt_at_s = float("-inf")
        self._closing = threading.Event()
        self._wanted = threading.Event()
        self._learner: threading.Thread | None = None
        if settings.cluster and settings.addresses:
            self._wanted.set()
            self._learner = threading.Thread(target=self._keep_learning, name="kv-topology", daemon=True)
            self._learner.start()

    @property
    def is_cluster(self) -> bool:
        return self._settings.cluster

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._shards

    def shard_of(self, key: bytes) -> Shard:
        """Needs at least one server."""
        shards = self.shards
        if self._settings.cluster:
            owner = self._slots.owner_of(key)
            return shards[0] if owner is None else self._shard_at(owner)
        if len(shards) == 1:
            return shards[0]
        tag = shard_tag(key)
        return max(shards, key=lambda shard: xxhash.xxh3_64_intdigest(shard.name.encode() + b"\0" + tag))

    def own(self, place: object) -> Shard:
        """A place that `shard_of` has returned."""
        assert isinstance(place, Shard)
        return place

    def follow(self, redirection: Redirection, *, asked: Shard) -> Shard:
        """Where a redirection leads. One for good is remembered."""
        address = at(asked.address, redirection.host, redirection.port)
        if not redirection.ask:
            self._slots.note(redirection.slot, address)
            self._wanted.set()
        return self._shard_at(address)

    def learn(self, deadline: Deadline) -> bool:
        """Ask any node for the map, unless somebody has just done so."""
        if not self._settings.cluster:
            return False
        if not self._learning.acquire(timeout=deadline.remaining_s()):
            return False
        try:
            return self._learn(deadline)
        finally:
            self._learning.release()

    def is_alone(self, connections: Sequence[RespConnection]) -> bool:
        """No other connection of this process is moving values to or from their server."""
        address = connections[0].address
        shard = self._by_address.get(address) if address is not None else None
        return shard is not None and shard.nobody_else(Lane.DATA, len(connections))

    def note_read(self, connection: RespConnection, value_bytes: int, seconds: float) -> None:
        """What one batch of reads over this connection has moved."""
        address = connection.address
        shard = self._by_address.get(address) if address is not None else None
        if shard is not None:
            shard.note_read(value_bytes, seconds)

    def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        if self._learner is not None:
            self._learner.join(timeout=self._settings.connect_timeout_s)
        for shard in self.shards:
            shard.close()

    def _learn(self, deadline: Deadline) -> bool:
        if self._clock.monotonic_s() - self._learnt_at_s < LEARN_INTERVAL_S:
            return True
        for shard in sorted(self.shards, key=lambda shard: not shard.available):
            reply = shard.exchange(Lane.CONTROL, _ask_for_slots, deadline=deadline)
            if self._slots.replace(reply, asked=shard.address):
                self._learnt_at_s = self._clock.monotonic_s()
                self._drop_strangers()
                return True
        return False

    def _shard_at(self, address: StoreAddress) -> Shard:
        with self._lock:
            shard = self._by_address.get(address)
            if shard is None:
                shard = self._by_address[address] = self._new_shard(address)
                self._shards = tuple(self._by_address.values())
            return shard

    def _new_shard(self, address: StoreAddress) -> Shard:
        return Shard(
            address, self._settings, jitter=Random(self._jitter.getrandbits(64)), clock=self._clock, greet=self._greet
        )

    def _drop_strangers(self) -> None:
        """Nodes that have no slot any more; those of the settings stay, to ask when all others are gone."""
        wanted = {*self._slots.addresses(), *self._settings.addresses}
        with self._lock:
            gone = [self._by_address.pop(address) for address in list(self._by_address) if address not in wanted]
            self._shards = tuple(self._by_address.values())
        for shard in gone:
            shard.close()

    def _keep_learning(self) -> None:
        while not self._closing.is_set():
            if self._wanted.wait(LOOK_AROUND_S) or not all(shard.available for shard in self.shards):
                self._wanted.clear()
                if not self._closing.is_set() and not self.learn(Deadline.after(1.0, self._clock)):
                    self._closing.wait(LEARN_INTERVAL_S)
                    self._wanted.set()


def _ask_for_slots(connections: Sequence[RespConnection], deadline: Deadline) -> Reply:
    (connection,) = connections
    connection.send([command(b"CLUSTER", b"SLOTS")], deadline=deadline)
    return connection.read_reply(deadline=deadline)
