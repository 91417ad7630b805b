"""One router's process: the ranks' table, the store's lookup, and the two fronts over one door.

bind ports ─▶ read tokenizer ─▶ watch the registry ─▶ listen ─▶ … ─▶ stop asked
  ─▶ not ready, refuse newcomers ─▶ let requests finish ─▶ close fronts, streams, registry
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence

from whalepod.cluster.config import ClusterConfig, join_address
from whalepod.cluster.fault_switch import FaultServicer
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registry import RegistryWatcher
from whalepod.cluster.static_ranks import StaticRanks
from whalepod.cluster.tls import ServerTls
from whalepod.cluster.tracing import configure_tracing
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import ConfigError
from whalepod.model.config import ModelConfig

from .app import HttpFront
from .authentication import Authenticator
from .dashboard_sources import dashboard_sources
from .grpc_front import GrpcFront
from .http_server import CLOSE_GRACE_S, bind_http, http_server
from .joint_memory import JointMemory
from .readiness import Readiness
from .router_parts import RouterParts, load_language, store_connector
from .usage_log import UsageLog

log = logging.getLogger(__name__)

GARBAGE_OBJECTS = 10_000
"""New objects after which the collector looks at them."""
SWITCH_S = 0.0005
"""After so long, a thread lets others have the interpreter. Each system call of the event loop may have to wait for it
to come back."""


async def run_router(
    config: ClusterConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    index: int = 0,
    orphaned: asyncio.Event | None = None,
    memory_file: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Serve until `stop` is set, then drain. Returns when nothing of the router is left.

    `index`: which of `router.processes` this is. `on_ready` is called when both fronts listen; the ranks may still be
    starting. `orphaned` set before `stop`: it leaves its ports first, because its successors want them. `memory_file`:
    of the memory of all these processes; None: there is one. Raises ConfigError or CheckpointError before serving.
    """
    listeners = _bind_http(config, index)
    name = join_address(config.reachable_host, config.router.http_port)
    configure_tracing(config.tracing, role="router", name=name if index == 0 else f"{name} {index}")
    try:
        memory: JointMemory | None = None
        if memory_file is not None:
            memory = JointMemory(memory_file, index, processes=config.router.process_count, clock=clock)
        router = RouterProcess(config, index, memory=memory, clock=clock)
        await router.serve(listeners, stop=stop, orphaned=orphaned or asyncio.Event(), on_ready=on_ready)
    finally:
        for listener in listeners:
            listener.close()


class RouterProcess:
    """The parts of a running router, and the order in which they start and stop."""

    def __init__(self, config: ClusterConfig, index: int, *, memory: JointMemory | None, clock: Clock) -> None:
        """`index`: which of `router.processes`. `memory`: of all of them."""
        self._config = config
        peer_tls = PeerTls.of(config.tls)
        addresses = (*config.router.prefill, *config.router.decode, *config.router.vision)
        self._watcher = RegistryWatcher(
            redis_url=config.redis_url_or_embedded,
            secret=config.cluster_secret(),
            on_change=None if addresses else lambda _: self._parts.ranks_changed(),
            tls=peer_tls,
            clock=clock,
        )
        self._static: StaticRanks | None = None
        if addresses:
            self._static = StaticRanks(
                addresses,
                secret=config.cluster_secret(),
                on_change=lambda _: self._parts.ranks_changed(),
                tls=peer_tls,
                clock=clock,
            )
        self._parts = RouterParts(
            config,
            ModelConfig.from_dir(config.model_dir),
            load_language(config),
            self._static or self._watcher,
            connect_store=store_connector(config, clock),
            purge_epoch=self._watcher.purge_epoch,
            tls=peer_tls,
            memory=memory,
            clock=clock,
        )
        self._readiness = Readiness(
            self._parts.front,
            needs_prefill=_needs_prefill(config),
            registry_ok=lambda: self._watcher.redis_ok,
            settled=lambda: (self._static or self._watcher).settled,
        )
        tls = _server_tls(config)
        authenticator = Authenticator.from_settings(config.router, clock=clock)
        self._usage_log = UsageLog(config.router.usage_file) if config.router.usage_file else None
        self._grpc = GrpcFront(
            self._parts.front,
            authenticator=authenticator,
            usage_log=self._usage_log,
            shares_port=config.router.process_count > 1,
        )
        if config.fault_injection:
            self._grpc.add(FaultServicer("router", None, secret=config.cluster_secret(), clock=clock))
        self._grpc.bind(join_address(config.host, config.router.grpc_port), tls=tls)
        front = HttpFront(
            self._parts.front,
            self._readiness,
            authenticator=authenticator,
            usage_log=self._usage_log,
            operators_apart=config.router.admin_port is not None,
            add_address=None if self._static is None else self._static.add,
            purge=self._watcher.purge,
            sources=dashboard_sources(config, index, clock),
            operator_hosts=(config.host, config.reachable_host, *config.router.operator_hosts),
            other_processes=[url for place, url in enumerate(config.operator_urls) if place != index],
        )
        self._http = [http_server(front.app(), tls=tls)]
        if config.router.admin_port is not None:
            self._http.append(http_server(front.admin_app()))
        self._leaving: asyncio.Task[None] | None = None
        """What ends the gRPC server, for as long as calls of an orphan go on."""

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        *,
        stop: asyncio.Event,
        orphaned: asyncio.Event,
        on_ready: Callable[[], None] | None,
    ) -> None:
        """`listeners`: of the public port, and of the operators' port if it has one of its own."""
        http: list[asyncio.Task[None]] = []
        try:
            # Before it listens: among processes that share a port it would be given clients, and know no rank for them.
            await self._watcher.start()
            if self._static is not None:
                await self._static.start()
            await self._grpc.start()
            for server, listener in zip(self._http, listeners, strict=True):
                http.append(asyncio.create_task(server.serve(sockets=[listener]), name="http"))
            await self._until_listening(http)
            host, router = self._config.host, self._config.router
            log.info(
                "router is listening",
                extra={"http": join_address(host, router.http_port), "grpc": join_address(host, router.grpc_port)},
            )
            _settle_interpreter()
            if on_ready is not None:
                on_ready()
            await _first_of(stop, *http)
            if orphaned.is_set():
                self._leave_ports()
            await self._drain(router.drain_seconds)
        finally:
            for server in self._http:
                server.should_exit = True
            await asyncio.gather(*http, return_exceptions=True)
            await self._grpc.stop(grace_s=CLOSE_GRACE_S)
            if self._leaving is not None:
                await self._leaving
            await self._parts.close()
            self._parts.front.language.close()
            if self._static is not None:
                await self._static.stop()
            await self._watcher.stop()
            if self._usage_log is not None:
                await asyncio.to_thread(self._usage_log.close)

    async def _until_listening(self, http: Sequence[asyncio.Task[None]]) -> None:
        while not all(server.started for server in self._http) and not any(task.done() for task in http):
            await asyncio.sleep(0.005)

    def _leave_ports(self) -> None:
        """Let others listen there. What has begun goes on."""
        for server in self._http:
            for listening in server.servers:
                listening.close()
        self._leaving = asyncio.create_task(self._grpc.stop(grace_s=self._config.router.drain_seconds))

    async def _drain(self, seconds: float) -> None:
        """Leave the load balancer, take nobody new, and let what is here finish, at most so long."""
        self._readiness.draining = True
        await self._grpc.set_serving(serving=False)
        admission = self._parts.front.admission
        admission.close()
        try:
            async with asyncio.timeout(seconds):
                await admission.wait_until_idle()
        except TimeoutError:
            log.warning("draining took too long", extra={"requests": admission.running})


def _settle_interpreter() -> None:
    """For a process that answers others: what has been loaded stays and is not walked through again, requests are no
    cycles to look for often, and a thread that reads a long body does not keep the event loop waiting for its turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)
    sys.setswitchinterval(SWITCH_S)


def _needs_prefill(config: ClusterConfig) -> bool:
    """Whether a cluster without a prefill rank has a fault."""
    router = config.router
    expected = bool(router.prefill) if router.decode else config.prefill.replicas > 0
    return expected and router.remote_prefill != "never"


async def _first_of(stop: asyncio.Event, *http: asyncio.Task[None]) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((stopping, *http), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def check_ports(config: ClusterConfig) -> None:
    """Raises ConfigError if another program listens where several processes are about to: they would share with it."""
    router = config.router
    for port, setting in ((router.http_port, "router.http_port"), (router.grpc_port, "router.grpc_port")):
        bind_http(config.host, port, setting=setting).close()


def _bind_http(config: ClusterConfig, index: int) -> list[socket.socket]:
    """Raises ConfigError if a port is taken."""
    router = config.router
    listeners: list[socket.socket] = []
    try:
        public = bind_http(config.host, router.http_port, setting="router.http_port", shared=router.process_count > 1)
        listeners.append(public)
        if config.admin_ports:
            listeners.append(bind_http(config.host, config.admin_ports[index], setting="router.admin_port"))
    except ConfigError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _server_tls(config: ClusterConfig) -> ServerTls | None:
    tls = config.tls
    if tls.cert_file is None or tls.key_file is None:
        return None
    return ServerTls(cert_file=tls.cert_file, key_file=tls.key_file, client_ca_file=tls.client_ca_file)
