"""One vision rank as a process of its own, or as a Ray actor.

bind port ─▶ read the vision tensors ─▶ listen, healthy ─▶ register ─▶ … ─▶ stop asked
  ─▶ leave placement (unhealthy, `draining`) ─▶ let calls finish ─▶ unregister ─▶ stop server, batcher, store
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from whalepod import __version__
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.grpc_options import server_options
from whalepod.cluster.rank_process import (
    DRAIN_POLL_S,
    SERVER_GRACE_S,
    RankIdentity,
    bind_rank,
    rank_identity,
    serve_rank_metrics,
)
from whalepod.cluster.registrar import Registrar
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.static_ranks import RankServicer
from whalepod.cluster.store_connection import RankStore, connect_rank_store
from whalepod.cluster.tracing import configure_tracing
from whalepod.cluster.vision_orders import VisionCaller
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import ConfigError
from whalepod.engine.boundaries import Boundaries
from whalepod.engine.rank_model import DTYPES, StateIdentity, set_arithmetic, usable_device
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RELEASE_FORMATS, plain_formats
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.vision.encoder import VisionEncoder

from .batcher import Batcher
from .servicer import VisionParts, VisionServicer

log = logging.getLogger(__name__)


async def run_vision_rank(
    config: ClusterConfig, index: int, *, stop: asyncio.Event, on_ready: Callable[[RankInfo], None] | None = None
) -> None:
    """Serve as vision rank `index` until `stop` is set and its calls have ended. Raises ConfigError or CheckpointError
    before serving."""
    identity = rank_identity(config, RankRole.VISION, index)
    configure_tracing(config.tracing, role=identity.pool, name=identity.rank_id)
    rank = VisionProcess(config, identity, clock=SYSTEM_CLOCK)
    try:
        await rank.start()
        if on_ready is not None:
            on_ready(rank.describe())
        await stop.wait()
        await rank.drain(config.router.drain_seconds)
    finally:
        await rank.close()


class VisionProcess:
    """The parts of a running vision rank, and the order in which they start and stop."""

    def __init__(self, config: ClusterConfig, identity: RankIdentity, *, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._secret = config.cluster_secret()
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        self._server = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._state: StateIdentity | None = None
        self._context_tokens_max = 0
        self._store: RankStore | None = None
        self._batcher: Batcher | None = None
        self._service: VisionServicer | None = None
        self._registrar: Registrar | None = None
        self._metrics: WSGIServer | None = None
        self._draining = False

    async def start(self) -> None:
        """Ports first: a taken port should cost no loading of weights."""
        await bind_rank(self._server, self._identity, clock=self._clock)
        with ThreadPoolExecutor(max_workers=1) as loader:
            service = await asyncio.get_running_loop().run_in_executor(loader, self._load)
        self._service = service
        service.register(self._server)
        RankServicer(self.describe, secret=self._secret).register(self._server)
        names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._server.start()
        await self._set_health(serving=True)
        self._metrics = serve_rank_metrics(self._identity)
        self._registrar = Registrar(
            redis_url=self._config.redis_url_or_embedded,
            secret=self._secret,
            describe=self.describe,
            clock=self._clock,
        )
        await self._registrar.start()
        log.info("rank is ready", extra={"rank": self._identity.rank_id, "address": self._identity.address})

    async def drain(self, seconds: float) -> None:
        """Leave placement, then let calls finish, at most so long."""
        assert self._service is not None
        assert self._registrar is not None
        self._draining = True
        self._service.start_draining()
        await self._set_health(serving=False)
        await self._registrar.announce()
        deadline = Deadline.after(seconds, self._clock)
        while self._service.requests_live and not deadline.expired:
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """Stop whatever has started."""
        if self._registrar is not None:
            await self._registrar.stop()
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.stop)
        await self._server.stop(SERVER_GRACE_S)
        if self._service is not None:
            self._service.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.shutdown)
            self._metrics.server_close()
        if self._store is not None:
            self._store.close()

    def describe(self) -> RankInfo:
        assert self._service is not None
        assert self._state is not None
        return RankInfo(
            rank_id=self._identity.rank_id,
            role=self._identity.role,
            pool=self._identity.pool,
            address=self._identity.address,
            incarnation=self._identity.incarnation,
            model=self._identity.model_name,
            namespace=self._state.namespace,
            layout=self._state.layout,
            context_tokens_max=self._context_tokens_max,
            fidelities=self._config.fidelity.allowed,
            version=__version__,
            time_unix_ms=self._clock.unix_ms(),
            load=self._service.load(),
            draining=self._draining,
        )

    def _load(self) -> VisionServicer:
        """Blocks while weights are read."""
        config, engine = self._config, self._config.engine
        model, device = ModelConfig.from_dir(config.model_dir), usable_device(engine.device)
        if model.vision_config is None:
            raise ConfigError(f"{config.model_dir} has no vision_config: this model sees no images")
        set_arithmetic(device, threads=engine.threads, cpu_operators=engine.cpu_operators)
        dtype = DTYPES[device.type]
        boundaries = Boundaries(model, model.block_tokens if engine.block_tokens is None else engine.block_tokens)
        formats = RELEASE_FORMATS if engine.quantized_caches else plain_formats(dtype)
        tokenizer = Tokenizer.from_dir(config.model_dir)
        state = StateIdentity.of(config.model_dir, boundaries, formats, tokenizer, dtype=dtype, device=device)
        encoder = VisionEncoder.load(config.model_dir, dtype=dtype, device=device)
        self._state, self._context_tokens_max = state, model.max_position_embeddings
        self._store = connect_rank_store(
            config,
            secret=self._secret,
            port=self._identity.port,
            serves=False,
            namespace=state.namespace,
            layout=state.block_layout,
            incarnation=self._identity.incarnation,
            clock=self._clock,
        )
        self._batcher = Batcher(encoder.encode, patches_max=config.vision.batch_patches)
        self._batcher.start()
        parts = VisionParts(
            config=model.vision_config,
            width=model.hidden_size,
            dtype=dtype,
            batcher=self._batcher,
            store=self._store.client,
            store_s=config.vision.store_seconds,
            caller=VisionCaller(self._identity.model_name, state.namespace, self._secret, self._clock),
            cache_rows=config.vision.cache_rows,
            calls_max=config.vision.queue_images,
        )
        return VisionServicer(parts)

    async def _set_health(self, *, serving: bool) -> None:
        assert self._service is not None
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service.name):
            await self._health.set(name, status)
