"""One rank's process: an engine, and around it the gRPC server, the registration, the metrics and the way out.

    load weights ─▶ start engine ─▶ listen, healthy ─▶ register ─▶ … ─▶ stop asked
      ─▶ leave placement (unhealthy, `draining`) ─▶ let requests finish ─▶ unregister ─▶ stop server, engine, store

The engine reports on its own thread; `deliver` of the service runs on the event loop, once a step.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, start_http_server

from whalepod import __version__
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ConfigError, InternalError
from whalepod.core.ids import Incarnation, RankId, mint_incarnation
from whalepod.engine.inline_spans import inline_spans
from whalepod.engine.interface import Fidelity, RankLoad, StepEvent
from whalepod.engine.memory_plan import plan_memory, vision_bytes
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import EngineRank
from whalepod.engine.rank_model import RankModel
from whalepod.engine.rank_shape import RankShape
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import ModelRole

from .config import METRICS_PORT_OFFSET, ClusterConfig, DecodeSettings, PrefillSettings, join_address
from .fault_switch import FaultServicer, FaultSwitch
from .grpc_options import server_options
from .machine_memory import machine_memory
from .rank_addresses import rank_port
from .rank_group import RankGroup, seat_of
from .rank_metrics import LoadCollector, count_events, count_work
from .rank_spans import RankSpans, SpanOptions
from .registrar import Registrar
from .registration import RankInfo, RankRole
from .static_ranks import RankServicer
from .store_connection import RankStore, connect_rank_store
from .tracing import configure_tracing
from .vision_orders import VisionCaller

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
    pool = "prefill" if role.is_prefill else role.value
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


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's service is given."""

    identity: RankIdentity
    engine: EngineRank
    secret: ClusterSecret
    namespace: bytes
    fidelities: tuple[Fidelity, ...]
    clock: Clock
    direct_address: str = ""
    """Where other ranks read what this one has published; empty: nowhere."""


class RankService(Protocol):
    """The gRPC service of a role. Everything here runs on the event loop."""

    @property
    def name(self) -> str:
        """Full protobuf name."""
        ...

    @property
    def requests_live(self) -> int:
        """Requests that somebody waits for."""
        ...

    def register(self, server: grpc.aio.Server) -> None: ...

    def deliver(self, events: Sequence[StepEvent], load: RankLoad) -> None:
        """What one engine step produced."""
        ...

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        ...


async def run_rank(
    config: ClusterConfig,
    identity: RankIdentity,
    make_service: Callable[[RankContext], RankService],
    *,
    stop: asyncio.Event,
    on_ready: Callable[[RankInfo], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Serve until `stop` is set, then drain. Returns when nothing of the rank is left.

    Raises ConfigError or CheckpointError before serving, InternalError if the engine stopped by itself.
    """
    configure_tracing(config.tracing, role=identity.pool, name=identity.rank_id)
    rank = RankProcess(config, identity, clock=clock)
    try:
        await rank.start(make_service)
        # What is loaded by now stays. Walking through it takes a full collection 0.1 s, in the middle of a stream.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(rank.describe())
        await rank.serve_until(stop)
        await rank.drain(config.router.drain_seconds)
    finally:
        await rank.close()


class RankProcess:
    """The parts of a running rank, and the order in which they start and stop."""

    def __init__(self, config: ClusterConfig, identity: RankIdentity, *, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._secret = config.cluster_secret()
        self._seat = seat_of(config, is_prefill=identity.role.is_prefill, index=identity.index)
        self._loop = asyncio.get_running_loop()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        self._server = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._draining = False
        self._faults = FaultSwitch(clock=clock) if config.fault_injection else None
        self._model: RankModel | None = None
        self._engine: EngineRank | None = None
        self._spans: RankSpans | None = None
        self._store: RankStore | None = None
        self._service: RankService | None = None
        self._registrar: Registrar | None = None
        self._group: RankGroup | None = None
        self._metrics: tuple[WSGIServer, LoadCollector] | None = None

    async def start(self, make_service: Callable[[RankContext], RankService]) -> None:
        """Ports first: a taken port should cost no loading of weights."""
        await bind_rank(self._server, self._identity, clock=self._clock)
        if self._seat is not None:
            self._group = RankGroup(
                self._config,
                is_prefill=self._identity.role.is_prefill,
                index=self._identity.index,
                incarnation=self._identity.incarnation,
                secret=self._secret,
                clock=self._clock,
            )
            self._group.register(self._server)
        with ThreadPoolExecutor(max_workers=1) as loader:
            engine = await self._loop.run_in_executor(loader, self._load_engine)
        assert self._model is not None
        assert self._store is not None
        context = RankContext(
            self._identity,
            engine,
            self._secret,
            self._model.namespace,
            self._config.fidelity.allowed,
            self._clock,
            self._store.direct_address,
        )
        self._service = make_service(context)
        self._service.register(self._server)
        RankServicer(self.describe, secret=self._secret).register(self._server)
        if self._faults is not None:
            log.warning("this rank takes orders of `whalepod fault` (fault_injection): not for production")
            rank_id = self._identity.rank_id
            FaultServicer(rank_id, self._faults, secret=self._secret, clock=self._clock).register(self._server)
        reflection.enable_server_reflection(
            (self._service.name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        engine.start()
        await self._server.start()
        if self._group is not None:
            await self._group.start()
        await self._set_health(serving=True)
        self._serve_metrics(engine)
        self._registrar = Registrar(
            redis_url=self._config.redis_url_or_embedded,
            secret=self._secret,
            describe=self.describe,
            clock=self._clock,
        )
        await self._registrar.start()
        log.info("rank is ready", extra={"rank": self._identity.rank_id, "address": self._identity.address})

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Raises InternalError if the engine breaks first."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((stopping, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._failure.done():
            raise InternalError(f"the engine of {self._identity.rank_id} stopped: {self._failure.result()}")

    async def drain(self, seconds: float) -> None:
        """Leave placement, then let what is here finish, at most so long."""
        assert self._service is not None
        assert self._registrar is not None
        self._draining = True
        self._service.start_draining()
        await self._set_health(serving=False)
        await self._registrar.announce()
        deadline = Deadline.after(seconds, self._clock)
        while self._service.requests_live and not deadline.expired and not self._failure.done():
            await asyncio.sleep(DRAIN_POLL_S)
        if self._service.requests_live:
            log.warning("draining took too long", extra={"requests": self._service.requests_live})

    async def close(self) -> None:
        """Stop whatever has started. The engine ends what is left with WorkerLostError while the server still talks."""
        if self._registrar is not None:
            await self._registrar.stop()
        if self._group is not None:
            await self._group.stop()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
            await asyncio.sleep(0)  # what the engine reported last is on its way to the event loop
        if self._spans is not None:
            self._spans.close()
        await self._server.stop(SERVER_GRACE_S)
        if self._metrics is not None:
            server, collector = self._metrics
            REGISTRY.unregister(collector)
            await asyncio.to_thread(server.shutdown)
            server.server_close()
        if self._store is not None:
            self._store.close()

    def describe(self) -> RankInfo:
        assert self._engine is not None
        limits = self._engine.limits
        allowed = self._config.fidelity.allowed
        return RankInfo(
            rank_id=self._identity.rank_id,
            role=self._identity.role,
            pool=self._identity.pool,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            model=self._identity.model_name,
            namespace=limits.namespace,
            layout=limits.layout,
            context_tokens_max=limits.context_tokens_max,
            fidelities=tuple(fidelity for fidelity in limits.fidelities if fidelity in allowed),
            version=__version__,
            time_unix_ms=self._clock.unix_ms(),
            load=self._engine.load(),
            draining=self._draining,
            reads_batches=True,
        )

    def _load_engine(self) -> EngineRank:
        """Blocks while weights are read."""
        config, identity = self._config, self._identity
        encoder = identity.role is RankRole.PREFILL_ENCODER
        self._model = RankModel.load(
            config.model_dir,
            role=ModelRole.ENCODER if encoder else ModelRole.FULL,
            block_tokens=config.engine.block_tokens,
            quantized_caches=config.engine.quantized_caches,
            threads=config.engine.threads,
            cpu_operators=config.engine.cpu_operators,
            kept_rows=config.engine.kept_rows,
            device=config.engine.device,
            seat=self._seat,
            before_loading=self._check_memory,
        )
        if self._group is not None and self._model.experts is not None:
            self._group.make_loop(self._model.experts, on_failure=self._on_failure)
        self._store = connect_rank_store(
            config,
            secret=self._secret,
            port=identity.port,
            serves=identity.role.is_prefill,
            namespace=self._model.namespace,
            layout=self._model.block_layout,
            incarnation=identity.incarnation,
            faults=self._faults,
            clock=self._clock,
        )
        self._spans = self._open_spans(self._model)
        self._engine = EngineRank(
            self._model,
            rank_options(config, identity.role, self._model.config),
            store=self._store.client,
            on_step=self._on_step,
            on_failure=self._on_failure,
            on_work=count_work,
            spans=self._spans,
            clock=self._clock,
        )
        return self._engine

    def _open_spans(self, model: RankModel) -> RankSpans | None:
        """The way to images' rows; None: the model sees none."""
        if model.config.vision_config is None:
            return None
        config = self._config
        inline = inline_spans(config.model_dir, model) if config.encodes_inline else None
        if inline is None and config.encodes_inline:
            return None  # its checkpoint holds the text model alone
        caller = VisionCaller(self._identity.model_name, model.namespace, self._secret, self._clock)
        options = SpanOptions(store_s=config.vision.store_seconds, timeout_s=config.vision.timeout_seconds)
        assert self._store is not None
        return RankSpans(model, options, caller=caller, store=self._store.client, inline=inline)

    def _check_memory(self, shape: RankShape) -> None:
        """Raises ConfigError before a weight is read, if they and the caches would not fit."""
        plan = plan_memory(shape, rank_options(self._config, self._identity.role, shape.config))
        vision = vision_bytes(shape) if self._config.encodes_inline else 0
        log.info("memory plan of %s: %s; vision encoder %.1f MiB", self._identity.rank_id, plan, vision / 2**20)
        memory = machine_memory()
        if shape.device.type == "cpu" and plan.total_bytes + vision > memory.available:
            what = "the machine" if memory.limit is None else f"the container (limit {memory.limit >> 20} MiB)"
            raise ConfigError(
                f"{self._identity.rank_id} does not fit: {plan}, but {what} has {memory.available >> 20} MiB left: "
                "lower slots or blocks of its pool, or give it more"
            )

    def _on_step(self, events: Sequence[StepEvent]) -> None:
        """On the engine's thread."""
        assert self._engine is not None
        count_events(events)
        self._loop.call_soon_threadsafe(self._deliver, events, self._engine.load())

    def _deliver(self, events: Sequence[StepEvent], load: RankLoad) -> None:
        assert self._service is not None
        self._service.deliver(events, load)

    def _on_failure(self, error: BaseException) -> None:
        """On the engine's thread."""
        log.critical("the engine stopped", extra={"rank": self._identity.rank_id}, exc_info=error)
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _set_health(self, *, serving: bool) -> None:
        assert self._service is not None
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service.name):
            await self._health.set(name, status)

    def _serve_metrics(self, engine: EngineRank) -> None:
        server = serve_rank_metrics(self._identity)
        assert self._model is not None
        collector = LoadCollector(engine.load, self._model.network.engram_reads)
        REGISTRY.register(collector)
        self._metrics = (server, collector)


async def bind_rank(server: grpc.aio.Server, identity: RankIdentity, *, clock: Clock) -> None:
    """A rank that is started again may meet its predecessor's port for a moment. Raises ConfigError."""
    address = join_address(identity.host, identity.port)
    patience = Deadline.after(BIND_PATIENCE_S, clock)
    while True:
        try:
            server.add_insecure_port(address)
            return
        except RuntimeError:
            if patience.expired:
                name, pool = identity.rank_id, identity.pool
                raise ConfigError(f"{name} cannot listen on {address} ({pool}.port): is it in use?") from None
        await asyncio.sleep(BIND_PAUSE_S)


def serve_rank_metrics(identity: RankIdentity) -> WSGIServer:
    """Raises ConfigError if the port is taken."""
    port = identity.metrics_port
    try:
        return start_http_server(port, addr=identity.host)[0]
    except OSError as error:
        raise ConfigError(f"the metrics of {identity.rank_id} cannot listen on port {port}: {error}") from None


def rank_options(config: ClusterConfig, role: RankRole, model: ModelConfig) -> RankOptions:
    """What a rank of this role may hold and do in a step. Raises ConfigError."""
    pool: PrefillSettings | DecodeSettings = config.prefill if role.is_prefill else config.decode
    directory = None if config.model is None else Path(config.model)
    return RankOptions(
        slots=pool.slots,
        soft_slots=max(32, 2 * pool.slots),  # a router sends so many (`rank_table.py`)
        blocks=pool.blocks,
        memory_bytes=None if pool.memory_gib is None else int(pool.memory_gib * 2**30),
        chunk_tokens=pool.chunk_tokens,
        chunk_tokens_beside_decode=min(pool.chunk_tokens, config.decode.chunk_tokens),
        context_tokens_max=config.engine.context_tokens_max,
        async_scheduling=config.engine.async_scheduling,
        speculation=None
        if role.is_prefill
        else config.dspark.options(model, directory=directory, device=config.engine.device),
    )
