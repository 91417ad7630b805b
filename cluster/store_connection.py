"""Builds the store's client from a cluster's settings: for a rank with all that belongs to it, for a router to look up.

rank:  servers checked ─▶ node cache (if there is room) ─▶ held values and their server (prefill) ─▶ client
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from random import Random

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.ids import Incarnation
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.direct_server import DirectServer
from whalepod.kvstore.held_values import HeldValues
from whalepod.kvstore.node_cache import NodeCache
from whalepod.kvstore.redis_transport import RedisTransport
from whalepod.kvstore.server_check import check_servers
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.transport import ValueTransport
from whalepod.kvstore.value_format import BlockLayout

from .config import DIRECT_PORT_OFFSET, ClusterConfig, join_address
from .fault_switch import FaultSwitch, FaultyStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankStore:
    """A rank's client, and the server by which others read from the rank, if there is one."""

    client: KvClient
    server: DirectServer | None
    direct_address: str
    """`host:port` that others reach `server` at; empty: there is none."""

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.client.close()


def store_settings(config: ClusterConfig, *, secret: ClusterSecret | None) -> StoreSettings:
    """`secret` None: for a process that reads no values. Raises ConfigError on an address or a contradiction."""
    addresses = tuple(StoreAddress.parse(url) for url in config.kv_urls)
    here = all(address.is_local for address in addresses) and StoreAddress(host=config.reachable_host).is_local
    signed = secret is not None and (config.kv.mac == "on" or (config.kv.mac == "auto" and not here))
    return StoreSettings(
        addresses=addresses,
        cluster=config.kv.cluster,
        retention_s=config.kv.retention_seconds,
        mac_key=secret.mac(Purpose.VALUE_KEY, b"") if secret is not None and signed else None,
    )


def connect_rank_store(
    config: ClusterConfig,
    *,
    secret: ClusterSecret,
    port: int,
    serves: bool,
    namespace: bytes,
    layout: BlockLayout,
    incarnation: Incarnation,
    faults: FaultSwitch | None = None,
    clock: Clock,
) -> RankStore:
    """`port` is the rank's; `serves`: it hands off, so others may read from it. Raises ConfigError."""
    settings = store_settings(config, secret=secret)
    check_servers(settings, policy=config.kv.maxmemory_policy, clock=clock)
    key = secret.mac(Purpose.DIRECT_KEY, namespace) if config.serves_direct else None
    held: HeldValues | None = None
    server: DirectServer | None = None
    if key is not None and serves:
        hold_bytes = config.kv.direct_hold_mib << 20
        held = HeldValues(bytes_max=hold_bytes, life_s=config.kv.direct_hold_seconds, clock=clock)
        server = DirectServer(held, key=key, host=config.host, port=port + DIRECT_PORT_OFFSET)
    transport: ValueTransport | None = None
    if faults is not None:
        transport = FaultyStore(RedisTransport(settings, jitter=Random(incarnation), clock=clock), faults)
    client = KvClient(
        settings,
        transport=transport,
        namespace=namespace,
        layout=layout,
        incarnation=incarnation,
        clock=clock,
        cache=_node_cache(config, secret, namespace, layout, clock),
        held=held,
        direct_key=key,
    )
    address = join_address(config.reachable_host, server.port) if server is not None else ""
    return RankStore(client, server, address)


def _node_cache(
    config: ClusterConfig, secret: ClusterSecret, namespace: bytes, layout: BlockLayout, clock: Clock
) -> NodeCache | None:
    """None: it is switched off, or the machine has no room for it."""
    directory = config.kv.node_cache_dir
    if not config.kv.node_cache_mib:
        return None
    # Clusters with different secrets share nothing, on one machine neither.
    name = secret.mac(Purpose.VALUE_KEY, b"node cache" + namespace)[:16]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return NodeCache(
            Path(directory),
            namespace=name,
            payload_bytes=layout.payload_bytes,
            bytes_max=config.kv.node_cache_mib << 20,
            clock=clock,
        )
    except OSError as error:
        log.warning("no node cache in %s: %s", directory, error.strerror or error)
        return None
