"""One vision rank as a process of its own, or as a Ray actor.

bind port ─▶ read the vision tensors ─▶ listen, healthy ─▶ register ─▶ … ─▶ stop asked
  ─▶ leave placement (unhealthy, `draining`) ─▶ let calls finish ─▶ unregister ─▶ stop server, batcher, store
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.rank_life import live
from whalepod.cluster.rank_server import RankIdentity, RankServer, rank_identity
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.store_connection import RankStore, connect_rank_store
from whalepod.cluster.tracing import configure_tracing
from whalepod.cluster.vision_orders import VisionCaller
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import ConfigError
from whalepod.engine.boundaries import Boundaries
from whalepod.engine.rank_model import DTYPES, StateIdentity, set_arithmetic, usable_device
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RELEASE_FORMATS, plain_formats
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.vision.encoder import VisionEncoder

from .batcher import Batcher
from .servicer import VisionParts, VisionServicer


async def run_vision_rank(
    config: ClusterConfig, index: int, *, stop: asyncio.Event, on_ready: Callable[[RankInfo], None] | None = None
) -> None:
    """Serve as vision rank `index` until `stop` is set and its calls have ended. Raises ConfigError or CheckpointError
    before serving."""
    identity = rank_identity(config, RankRole.VISION, index)
    configure_tracing(config.tracing, role=identity.pool, name=identity.rank_id)
    rank = VisionProcess(config, identity, clock=SYSTEM_CLOCK)
    await live(rank, stop=stop, drain_s=config.router.drain_seconds, on_ready=on_ready)


class VisionProcess:
    """A LivingRank around an encoder."""

    def __init__(self, config: ClusterConfig, identity: RankIdentity, *, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._secret = config.cluster_secret()
        self._server = RankServer(config, identity, tls=PeerTls.of(config.tls), clock=clock)
        self._state: StateIdentity | None = None
        self._context_tokens_max = 0
        self._store: RankStore | None = None
        self._batcher: Batcher | None = None
        self._service: VisionServicer | None = None

    async def start(self) -> None:
        """Ports first: a taken port should cost no loading of weights."""
        await self._server.bind()
        with ThreadPoolExecutor(max_workers=1) as loader:
            service = await asyncio.get_running_loop().run_in_executor(loader, self._load)
        self._service = service
        await self._server.listen(service, self.describe)
        await self._server.join()

    async def serve_until(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def drain(self, seconds: float) -> None:
        """Leave placement, then let calls finish, at most so long."""
        await self._server.drain(seconds)

    async def close(self) -> None:
        """Stop whatever has started."""
        await self._server.leave()
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.stop)
        await self._server.close()
        if self._service is not None:
            self._service.close()
        if self._store is not None:
            self._store.close()

    def describe(self) -> RankInfo:
        assert self._service is not None
        assert self._state is not None
        return self._server.described(
            namespace=self._state.namespace,
            layout=self._state.layout,
            context_tokens_max=self._context_tokens_max,
            fidelities=self._config.fidelity.allowed,
            load=self._service.load(),
        )

    def _load(self) -> VisionServicer:
        """Blocks while weights are read."""
        config, engine = self._config, self._config.engine
        model, device = ModelConfig.from_dir(config.model_dir), usable_device(engine.device)
        if model.vision_config is None:
            raise ConfigError(f"{config.model_dir} has no vision_config: this model sees no images")
        set_arithmetic(
            device,
            threads=engine.threads,
            cpu_operators=engine.cpu_operators,
            launch_table_file=engine.launch_table_file,
        )
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
            faults=self._server.faults,
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
