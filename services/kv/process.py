"""The KV service's process: `KvService` with health and reflection, and the round of quotas and eviction.

The data path works without it. Several may run: one at a time looks after a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from whalepod.cluster.config import METRICS_PORT_OFFSET, ClusterConfig, join_address
from whalepod.cluster.fault_switch import FaultServicer
from whalepod.cluster.grpc_options import server_options
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registration_store import connect_registry
from whalepod.cluster.store_connection import store_settings
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import ConfigError
from whalepod.core.ids import mint_incarnation
from whalepod.core.tasks import cancel_and_wait
from whalepod.kvstore.caretaker import Caretaker
from whalepod.kvstore.server_check import check_servers
from whalepod.rpc.kv.v1 import kv_pb2_grpc

from .servicer import KvServicer

log = logging.getLogger(__name__)

GRACE_S = 1.0


async def run_kv_service(
    config: ClusterConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Serve until `stop` is set. Raises ConfigError if the port is taken or a server is set up otherwise."""
    settings = store_settings(config, secret=None)
    await asyncio.to_thread(check_servers, settings, policy=config.kv.maxmemory_policy, clock=clock)
    quota = config.kv.tenant_quota_mib
    caretaker = Caretaker(
        settings.addresses,
        name=f"{mint_incarnation():016x}",
        quota_bytes=None if quota is None else quota << 20,
        clock=clock,
        cluster=config.kv.cluster,
    )
    registry = connect_registry(config.redis_url_or_embedded)
    servicer = KvServicer(caretaker, registry=registry, evict=config.kv.evictor, clock=clock)
    server = _server(servicer, join_address(config.host, config.kv.port), PeerTls.of(config.tls))
    if config.fault_injection:
        FaultServicer("kv", None, secret=config.cluster_secret(), clock=clock).register(server)
    try:
        pages, _ = start_http_server(config.kv.port + METRICS_PORT_OFFSET, addr=config.host)
    except OSError as error:
        raise ConfigError(
            f"the kv service's metrics cannot listen on port {config.kv.port + METRICS_PORT_OFFSET}: {error}"
        ) from None
    await server.start()
    tending = asyncio.create_task(servicer.tend_forever(), name="kv-tending")
    log.info("kv service is listening", extra={"address": join_address(config.host, config.kv.port)})
    if on_ready is not None:
        on_ready()
    try:
        await stop.wait()
    finally:
        await cancel_and_wait(tending)
        await server.stop(GRACE_S)
        pages.shutdown()
        pages.server_close()
        await servicer.close()
        await registry.aclose()


def _server(servicer: KvServicer, address: str, tls: PeerTls | None) -> grpc.aio.Server:
    server = grpc.aio.server(options=server_options())
    kv_pb2_grpc.add_KvServiceServicer_to_server(servicer, server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    checks.set(servicer.name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((servicer.name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        raise ConfigError(f"the kv service cannot listen on {address} (kv.port): is it in use?") from None
    return server
