"""The ranks that this process reads from directly: their connections, and what has been learnt of their speed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from random import Random

from whalepod.core.clock import Clock
from whalepod.core.errors import ConfigError

from .block_batches import BatchThreads, BlockBatches
from .direct_greeting import greeting
from .missing_keys import MissingKeys
from .redis_transport import RedisTransport
from .settings import StoreAddress, StoreSettings
from .transport import ValueTransport
from .value_writer import ValueWriter

PEERS_MAX = 64
IDLE_S_MAX = 60.0
"""A rank that nothing was read from for so long is forgotten: it may not come back under this address."""


@dataclass(slots=True)
class Peer:
    """One rank to read from."""

    transport: ValueTransport
    batches: BlockBatches
    used_at_s: float


class DirectPeers:
    """Thread-safe. `settings` are the store's, for their patience."""

    def __init__(
        self,
        settings: StoreSettings,
        writer: ValueWriter,
        *,
        key: bytes,
        threads: BatchThreads,
        jitter: Random,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._greet = greeting(key)
        self._threads = threads
        self._jitter = jitter
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()

    def find(self, address: str) -> Peer | None:
        """The rank at `host:port`, which may or may not answer. None: that is no address."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            gone = self._forgotten(now_s)
            peer = self._peers.get(address)
            if peer is None:
                peer = self._new_peer(address)
                if peer is not None:
                    self._peers[address] = peer
            if peer is not None:
                peer.used_at_s = now_s
                self._peers.move_to_end(address)
        for other in gone:
            other.transport.close()
        return peer

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.transport.close()

    def _forgotten(self, now_s: float) -> list[Peer]:
        gone: list[Peer] = []
        while self._peers:
            address, oldest = next(iter(self._peers.items()))
            if len(self._peers) < PEERS_MAX and now_s - oldest.used_at_s < IDLE_S_MAX:
                break
            gone.append(self._peers.pop(address))
        return gone

    def _new_peer(self, address: str) -> Peer | None:
        try:
            where = StoreAddress.parse(address)
        except ConfigError:
            return None
        settings = replace(self._settings, addresses=(where,), cluster=False)
        jitter = Random(self._jitter.getrandbits(64))
        transport = RedisTransport(settings, jitter=jitter, clock=self._clock, greet=self._greet)
        # What a rank does not hold now says nothing about a moment later, so nothing is remembered as missing.
        missing = MissingKeys(life_s=0.0, clock=self._clock)
        batches = BlockBatches(transport, self._writer, renewals=None, missing=missing, threads=self._threads)
        return Peer(transport, batches, self._clock.monotonic_s())
