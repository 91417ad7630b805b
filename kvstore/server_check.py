"""Whether servers are set up as this cluster believes: asked once at start, so that a wrong one is refused by name.

A server that does not answer is no reason not to start: the cluster runs without hits until it does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import ConfigError

from .faults import StoreFault
from .resp import RespConnection, command
from .settings import StoreAddress, StoreSettings

logger = logging.getLogger(__name__)

ANY_POLICY = "any"
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What `INFO` says of one server. Bytes; 0 as a limit: there is none."""

    version: str
    cluster: bool
    policy: str
    memory_bytes_used: int
    memory_bytes_max: int
    fragmentation: float
    """Memory taken from the system for each byte used."""


def check_servers(settings: StoreSettings, *, policy: str, clock: Clock = SYSTEM_CLOCK) -> None:
    """Raises ConfigError, naming the setting and what the server has instead. `policy`: the eviction policy that every
    server with a memory limit must have, or `any`."""
    for address in settings.addresses:
        info = server_info(address, deadline=Deadline.after(PATIENCE_S, clock))
        if info is None:
            logger.warning("store %s does not answer: there are no hits until it does", address)
            continue
        if info.cluster != settings.cluster:
            is_, says = ("is a node of", "does not say so") if info.cluster else ("is no node of", "says so")
            raise ConfigError(f"{address} {is_} a Redis Cluster, but kv.cluster {says}")
        if not info.memory_bytes_max:
            logger.warning(
                "store %s has no memory limit: set maxmemory, or it grows until the machine is full", address
            )
        elif policy not in (ANY_POLICY, info.policy):
            raise ConfigError(
                f"{address} has maxmemory-policy {info.policy}, but kv.maxmemory_policy is {policy}: change one of them"
            )


def server_info(address: StoreAddress, *, deadline: Deadline) -> ServerInfo | None:
    """None: it does not answer, or will not say."""
    try:
        connection = RespConnection.connect(address, deadline=deadline)
    except StoreFault:
        return None
    try:
        if address.password:
            user = (address.username.encode(),) if address.username else ()
            connection.send([command(b"AUTH", *user, address.password.encode())], deadline=deadline)
            connection.read_reply(deadline=deadline)
        connection.send([command(b"INFO")], deadline=deadline)
        reply = connection.read_reply(deadline=deadline)
    except StoreFault:
        return None
    finally:
        connection.close()
    return parse_info(reply) if isinstance(reply, bytes) else None


def parse_info(text: bytes) -> ServerInfo:
    """Total: what is missing or strange is taken as zero."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    fields = {name: value.strip() for name, _, value in lines}

    def number(name: str) -> float:
        try:
            return float(fields.get(name, "0"))
        except ValueError:
            return 0.0

    return ServerInfo(
        version=fields.get("redis_version", ""),
        cluster=fields.get("cluster_enabled") == "1",
        policy=fields.get("maxmemory_policy", ""),
        memory_bytes_used=int(number("used_memory")),
        memory_bytes_max=int(number("maxmemory")),
        fragmentation=number("mem_fragmentation_ratio"),
    )
