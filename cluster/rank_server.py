"""What is around the service of every rank, whatever it does: gRPC server, health, registration, metrics, the way out.

bind ─▶ (weights are read) ─▶ listen ─▶ join: healthy, registered ─▶ … ─▶ drain: out of placement, calls end
  ─▶ leave: unregistered ─▶ (the rank stops its parts) ─▶ close
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from whalepod import __version__
from whalepod.core.clock import Clock, Deadline
from whalepod.core.errors import ConfigError
from whalepod.core.ids import Incarnation, RankId, mint_incarnation
from whalepod.engine.interface import Fidelity, RankLoad

from .config import METRICS_PORT_OFFSET, ClusterConfig, join_address
from .fault_switch import FaultServicer, FaultSwitch
from .grpc_options import server_options
from .peer_tls import PeerTls
from .rank_addresses import rank_port
from .registrar import Registrar
from .registration import RankInfo, RankRole
from .static_ranks import RankServicer

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
SERVER_GRACE_S = 1.0
BIND_PATIENCE_S = 3.0
BIND_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank a process is. `rank_id` survives a restart, `incarnation` does not."""

    rank_id: RankId
    index: int
    """In its pool, from 0."""
    role: RankRole
    pool: str
    host: str
    port: int
    address: str
    incarnation: Incarnation
    model_name: str

    @property
    def metrics_port(self) -> int:
        return self.port + METRICS_PORT_OFFSET


def rank_identity(config: ClusterConfig, role: RankRole, index: int) -> RankIdentity:
    """Rank `index` (from 0) of the pool of `role`."""
    pool = role.pool
    port = rank_port(config, pool, index)
    return RankIdentity(
        rank_id=RankId(f"{pool}-{index}"),
        index=index,
        role=role,
        pool=pool,
        host=config.host,
        port=port,
        address=join_address(config.reachable_host, port),
        incarnation=mint_incarnation(),
        model_name=config.model_name,
    )


class ServedPart(Protocol):
    """A gRPC service. Everything here runs on the event loop."""

    @property
    def name(self) -> str:
        """Full protobuf name."""
        ...

    @property
    def requests_live(self) -> int:
        """Requests that somebody waits for."""
        ...

    def register(self, server: grpc.aio.Server) -> None: ...

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        ...


class RankServer:
    """For one event loop."""

    def __init__(
        self, config: ClusterConfig, identity: RankIdentity, *, tls: PeerTls | None = None, clock: Clock
    ) -> None:
        """`tls` None: plain text."""
        self._config = config
        self._tls = tls
        self._identity = identity
        self._clock = clock
        self._secret = config.cluster_secret()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        self.server = grpc.aio.server(options=server_options())
        """For services beside the rank's own, before `listen`."""
        self.faults = FaultSwitch(clock=clock) if config.fault_injection else None
        """What the rank is to suffer, where that may be ordered."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._service: ServedPart | None = None
        self._describe: Callable[[], RankInfo] | None = None
        self._registrar: Registrar | None = None
        self._metrics: WSGIServer | None = None
        self._draining = False

    async def bind(self) -> None:
        """A rank that is started again may meet its predecessor's port for a moment. Raises ConfigError."""
        identity = self._identity
        address = join_address(identity.host, identity.port)
        patience = Deadline.after(BIND_PATIENCE_S, self._clock)
        while True:
            try:
                if self._tls is None:
                    self.server.add_insecure_port(address)
                else:
                    self.server.add_secure_port(address, self._tls.server_credentials())
                return
            except RuntimeError:
                if patience.expired:
                    name, pool = identity.rank_id, identity.pool
                    raise ConfigError(f"{name} cannot listen on {address} ({pool}.port): is it in use?") from None
            await asyncio.sleep(BIND_PAUSE_S)

    async def listen(self, service: ServedPart, describe: Callable[[], RankInfo]) -> None:
        """Calls are answered from here on. `describe` tells the registration as of now."""
        self._service, self._describe = service, describe
        service.register(self.server)
        RankServicer(describe, secret=self._secret).register(self.server)
        if self.faults is not None:
            faults = FaultServicer(self._identity.rank_id, self.faults, secret=self._secret, clock=self._clock)
            faults.register(self.server)
        reflection.enable_server_reflection((service.name, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        await self.server.start()

    async def join(self) -> None:
        """Into placement. Raises ConfigError if the port of the metrics is taken."""
        assert self._describe is not None, "join after listen"
        await self._set_health(serving=True)
        self._metrics = _metrics_page(self._identity)
        self._registrar = Registrar(
            redis_url=self._config.redis_url_or_embedded,
            secret=self._secret,
            describe=self._describe,
            clock=self._clock,
        )
        await self._registrar.start()
        log.info("rank is ready", extra={"rank": self._identity.rank_id, "address": self._identity.address})

    async def drain(self, seconds: float, *, broken: Callable[[], bool] = lambda: False) -> None:
        """Leave placement, then let what is here finish, at most so long, and no longer once it is `broken`."""
        assert self._service is not None
        assert self._registrar is not None
        self._draining = True
        self._service.start_draining()
        await self._set_health(serving=False)
        await self._registrar.announce()
        deadline = Deadline.after(seconds, self._clock)
        while self._service.requests_live and not deadline.expired and not broken():
            await asyncio.sleep(DRAIN_POLL_S)
        if self._service.requests_live:
            log.warning("draining took too long", extra={"requests": self._service.requests_live})

    async def leave(self) -> None:
        """Out of the registry. As `close`, it may follow any part of a start."""
        if self._registrar is not None:
            await self._registrar.stop()

    async def close(self) -> None:
        await self.server.stop(SERVER_GRACE_S)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.shutdown)
            self._metrics.server_close()

    def described(
        self,
        *,
        namespace: bytes,
        layout: str,
        context_tokens_max: int,
        fidelities: tuple[Fidelity, ...],
        load: RankLoad,
    ) -> RankInfo:
        """The rank's registration as of now."""
        identity = self._identity
        return RankInfo(
            rank_id=identity.rank_id,
            role=identity.role,
            pool=identity.pool,
            address=identity.address,
            incarnation=identity.incarnation,
            model=identity.model_name,
            namespace=namespace,
            layout=layout,
            context_tokens_max=context_tokens_max,
            fidelities=fidelities,
            version=__version__,
            time_unix_ms=self._clock.unix_ms(),
            load=load,
            draining=self._draining,
            speaks_tls=self._tls is not None,
        )

    async def _set_health(self, *, serving: bool) -> None:
        assert self._service is not None
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service.name):
            await self._health.set(name, status)


def _metrics_page(identity: RankIdentity) -> WSGIServer:
    """Raises ConfigError if the port is taken."""
    port = identity.metrics_port
    try:
        return start_http_server(port, addr=identity.host)[0]
    except OSError as error:
        raise ConfigError(f"the metrics of {identity.rank_id} cannot listen on port {port}: {error}") from None
