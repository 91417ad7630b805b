"""One rank's process: an engine, and around it the gRPC server, the registration, the metrics and the way out.

    load weights ─▶ warm up ─▶ start engine ─▶ listen, healthy ─▶ register ─▶ … ─▶ stop asked
      ─▶ leave placement (unhealthy, `draining`) ─▶ let requests finish ─▶ unregister ─▶ stop server, engine, store

The engine reports on its own thread; `deliver` of the service runs on the event loop, once a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from prometheus_client import REGISTRY

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ConfigError, InternalError
from whalepod.engine.inline_spans import inline_spans
from whalepod.engine.interface import Fidelity, RankLoad, StepEvent, Work
from whalepod.engine.memory_plan import plan_memory, vision_bytes
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import EngineRank
from whalepod.engine.rank_model import RankModel
from whalepod.engine.rank_shape import RankShape
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import ModelRole

from .config import ClusterConfig
from .machine_memory import machine_memory
from .peer_tls import PeerTls
from .pool_settings import DecodeSettings, PrefillSettings
from .rank_group import RankGroup, computes_in_group, seat_of
from .rank_life import live
from .rank_metrics import LoadCollector, count_events, count_work
from .rank_server import RankIdentity, RankServer, ServedPart
from .rank_spans import RankSpans, SpanOptions
from .registration import RankInfo, RankRole
from .store_connection import RankStore, connect_rank_store
from .tracing import configure_tracing
from .vision_orders import VisionCaller

log = logging.getLogger(__name__)


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


class RankService(ServedPart, Protocol):
    """The gRPC service of a role."""

    def deliver(self, events: Sequence[StepEvent], load: RankLoad) -> None:
        """What one engine step produced."""
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
    rank = RankProcess(config, identity, make_service, clock=clock)
    await live(rank, stop=stop, drain_s=config.router.drain_seconds, on_ready=on_ready)


class RankProcess:
    """A LivingRank around an engine."""

    def __init__(
        self,
        config: ClusterConfig,
        identity: RankIdentity,
        make_service: Callable[[RankContext], RankService],
        *,
        clock: Clock,
    ) -> None:
        self._config = config
        self._identity = identity
        self._make_service = make_service
        self._clock = clock
        self._secret = config.cluster_secret()
        self._seat = seat_of(config, pool=identity.pool, index=identity.index)
        self._loop = asyncio.get_running_loop()
        self._tls = PeerTls.of(config.tls)
        self._server = RankServer(config, identity, tls=self._tls, clock=clock)
        self._failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._model: RankModel | None = None
        self._engine: EngineRank | None = None
        self._spans: RankSpans | None = None
        self._store: RankStore | None = None
        self._service: RankService | None = None
        self._group: RankGroup | None = None
        self._collector: LoadCollector | None = None

    async def start(self) -> None:
        """Ports first: a taken port should cost no loading of weights."""
        await self._server.bind()
        if computes_in_group(self._config, pool=self._identity.pool):
            own = self._identity
            self._group = RankGroup(
                self._config,
                own.pool,
                own.index,
                incarnation=own.incarnation,
                secret=self._secret,
                tls=self._tls,
                clock=self._clock,
            )
            self._group.register(self._server.server)
        with ThreadPoolExecutor(max_workers=1) as loader:
            engine = await self._loop.run_in_executor(loader, self._load_engine)
        assert self._model is not None
        assert self._store is not None
        store = self._store
        context = RankContext(
            self._identity,
            engine,
            self._secret,
            self._model.namespace,
            self._config.fidelity.allowed,
            self._clock,
            self._store.direct_address,
        )
        self._service = self._make_service(context)
        engine.start()
        await self._server.listen(self._service, self.describe)
        if self._group is not None:
            await self._group.start()
        self._collector = LoadCollector(
            engine.load,
            self._model.network.engram_reads,
            node_cache_blocks=lambda: store.client.node_cache_blocks,
            write_queue_bytes=lambda: engine.write_queue_bytes,
        )
        REGISTRY.register(self._collector)
        await self._server.join()

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
        await self._server.drain(seconds, broken=self._failure.done)

    async def close(self) -> None:
        """Stop whatever has started. The engine gives back what is left while the server still talks, and before a
        group goes on without this rank: a step that breaks for that would end requests as lost."""
        if self._engine is not None:
            self._engine.give_back()
        await self._server.leave()
        if self._group is not None:
            await self._group.stop()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
            await asyncio.sleep(0)  # what the engine reported last is on its way to the event loop
        if self._spans is not None:
            self._spans.close()
        await self._server.close()
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
        if self._store is not None:
            self._store.close()

    def describe(self) -> RankInfo:
        assert self._engine is not None
        limits = self._engine.limits
        allowed = self._config.fidelity.allowed
        return self._server.described(
            namespace=limits.namespace,
            layout=limits.layout,
            context_tokens_max=limits.context_tokens_max,
            fidelities=tuple(fidelity for fidelity in limits.fidelities if fidelity in allowed),
            load=self._engine.load(),
        )

    def _load_engine(self) -> EngineRank:
        """Blocks while weights are read and the engine warms up."""
        config, identity = self._config, self._identity
        encoder = identity.pool == "prefill" and config.prefill.role == "encoder"
        self._model = RankModel.load(
            config.model_dir,
            role=ModelRole.ENCODER if encoder else ModelRole.FULL,
            block_tokens=config.engine.block_tokens,
            quantized_caches=config.engine.quantized_caches,
            threads=config.engine.threads,
            cpu_operators=config.engine.cpu_operators,
            launch_table_file=config.engine.launch_table_file,
            kept_rows=config.engine.kept_rows,
            device=config.engine.device,
            seat=self._seat,
            before_loading=self._check_memory,
        )
        if self._group is not None and self._model.experts is not None:
            self._group.share_experts(self._model.experts, on_failure=self._on_failure)
        elif self._group is not None:
            self._model = replace(self._model, context=self._group.share_prompts(on_failure=self._on_failure))
        self._store = connect_rank_store(
            config,
            secret=self._secret,
            port=identity.port,
            serves=identity.role.is_prefill,
            namespace=self._model.namespace,
            layout=self._model.block_layout,
            incarnation=identity.incarnation,
            faults=self._server.faults,
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
        if self._warms_up(self._model):
            work = Work.PREFILL if identity.role.is_prefill else Work.GENERATE
            self._engine.warm_up(work, config.fidelity.allowed)
        return self._engine

    def _warms_up(self, model: RankModel) -> bool:
        """In a group every pass is everyone's: to warm up there would hold up ranks that serve."""
        wanted = self._config.engine.warm_up
        on_gpu = model.network.device.type == "cuda"
        return self._group is None and (wanted == "on" or (wanted == "auto" and on_gpu))

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
        return RankSpans(model, options, caller=caller, store=self._store.client, inline=inline, tls=self._tls)

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


def rank_options(config: ClusterConfig, role: RankRole, model: ModelConfig) -> RankOptions:
    """What a rank of this role may hold and do in a step. Raises ConfigError."""
    pool: PrefillSettings | DecodeSettings = config.prefill if role.pool == "prefill" else config.decode
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
        if role.pool == "prefill"
        else config.dspark.options(model, directory=directory, device=config.engine.device),
    )
