"""A whole cluster on this machine: Redis, Ray with two pools of ranks, and a router. What it starts, it stops.

    start: janitor ─▶ Redis ─▶ router (a child process) and Ray ─▶ ranks ─▶ wait until ranks and router say ready
    stop:  router drains ─▶ ranks drain ─▶ Ray ─▶ Redis ─▶ janitor ends what is left

When this process is killed, the janitor alone does the second line.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import httpx
import yaml

from whalepod.core.clock import Deadline
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId, mint_cluster_secret

from .child_process import SupervisedChild
from .config import ClusterConfig
from .embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from .janitor import Janitor
from .peer_tls import PeerTls
from .pool_control import PoolControl
from .pools import RankPools, rank_places
from .ray_runtime import prepare_ray_environment, start_ray, stop_ray
from .registration import RankInfo
from .registry import RegistryWatcher

READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.1
NODE_CACHE_MIB: Final = 128
"""Of a cluster that does not say."""
STOP_SLACK_S: Final = 5.0
"""What stopping may take beyond draining, for each part."""

Result = TypeVar("Result")


@contextlib.asynccontextmanager
async def running_cluster(
    config: ClusterConfig, *, say: Callable[[str], None] = lambda _: None, ready_timeout_s: float = READY_TIMEOUT_S
) -> AsyncGenerator[LocalCluster]:
    """A cluster that is ready. It is stopped when the block ends, however it ends."""
    cluster = LocalCluster(config, say=say)
    try:
        await cluster.start()
        await cluster.wait_ready(timeout_s=ready_timeout_s)
        yield cluster
    finally:
        await cluster.stop()


class LocalCluster:
    """`config` names a model; ports must be free. Everything runs for and on one event loop."""

    def __init__(self, config: ClusterConfig, *, say: Callable[[str], None]) -> None:
        self._say = say
        # Sockets of Ray lie in it, and a socket's path has 107 characters at most: TMPDIR may be too long already.
        self.run_dir = Path(tempfile.mkdtemp(prefix="whalepod-", dir="/tmp" if Path("/tmp").is_dir() else None))
        self.secret = _secret_of(config)
        # A node cache of its own, which goes with it.
        self._cache_dir = config.kv.node_cache_dir / self.run_dir.name
        cache_mib = NODE_CACHE_MIB if config.kv.node_cache_mib is None else config.kv.node_cache_mib
        kv = config.kv.model_copy(update={"node_cache_dir": self._cache_dir, "node_cache_mib": cache_mib})
        # Others who read this cluster's file must find as many processes, whatever their own share of the machine is.
        router = config.router.model_copy(update={"processes": config.router.process_count})
        self.config = config.without_secret().model_copy(
            update={"secret_file": self.run_dir / "secret", "kv": kv, "router": router}
        )
        self.redis: EmbeddedRedis | None = None
        self.pools = RankPools(self.config, secret=self.secret)
        self.router = SupervisedChild(
            "the router", [sys.executable, "-m", "whalepod", "router", "--config", str(self.config_file)]
        )
        self._janitor: Janitor | None = None
        self._ray_started = False
        self._control: PoolControl | None = None
        # Ray's daemons end with the thread that started them, so it lives as long as they should.
        self._ray_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")

    @property
    def config_file(self) -> Path:
        """The settings of this cluster, for its other processes and for tools."""
        return self.run_dir / "cluster.yaml"

    def use(self, config: ClusterConfig) -> None:
        """Settings that have changed while it runs."""
        self.config = config
        self._write_files()

    @property
    def http_url(self) -> str:
        """Where this machine's clients reach the router."""
        return self.config.public_url

    async def start(self) -> None:
        """Start everything; nothing is ready yet. Raises ConfigError."""
        self._write_files()
        self._janitor = Janitor(self.run_dir, self._cache_dir)
        if self.config.redis_url is None:
            self._say(f"starting Redis on port {self.config.redis_port}")
            self.redis = EmbeddedRedis(
                EmbeddedRedisSettings(
                    port=self.config.redis_port,
                    memory_bytes=self.config.redis_memory_mib * 2**20,
                    directory=self.run_dir,
                )
            )
            await asyncio.to_thread(self.redis.start)
        self._say("starting the router and Ray")
        await self.router.start()
        prepare_ray_environment(self.config)
        self._ray_started = True
        await self.on_ray_thread(
            lambda: start_ray(self.config, temp_dir=self.run_dir / "ray", namespace=self.run_dir.name)
        )
        self._control = await PoolControl(self).start()
        self._say("starting ranks: " + ", ".join(place.rank_id for place in rank_places(self.config)))
        await self.on_ray_thread(self.pools.start)

    async def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until every rank is registered and the router is ready and knows them all. Raises UnavailableError, saying
        what is not."""
        deadline = Deadline.after(timeout_s)
        places = list(rank_places(self.config))
        wanted = {place.rank_id for place in places}
        placed = sum(place.takes_requests(self.config) for place in places)
        told: set[RankId] = set()
        async with self.watching_ranks() as watcher, httpx.AsyncClient(trust_env=False, verify=False) as client:
            # Our own child on our own machine is asked how it is; its certificate is for clients.
            while True:
                await self.raise_failure()
                for sentence in await self.on_ray_thread(self.pools.without_places):
                    self._say(sentence)
                for rank_id in sorted(set(watcher.ranks) - told):
                    told.add(rank_id)
                    self._say(_describe(watcher.ranks[rank_id]))
                router_ready = await self._router_is_ready(client, ranks=placed)
                if router_ready and wanted <= told:
                    self.pools.note_all_placed()
                    return
                if deadline.expired:
                    late = sorted(wanted - told) + ([] if router_ready else ["the router"])
                    raise UnavailableError(f"not ready after {timeout_s:g} s: {', '.join(late)}")
                await asyncio.sleep(POLL_S)

    async def raise_failure(self) -> None:
        """Raises UnavailableError if a part of the cluster has ended for good."""
        failures = await self.on_ray_thread(self.pools.failures)
        for rank_id, reason in failures.items():
            raise UnavailableError(f"{rank_id} did not start: {reason}")
        if self.router.failure is not None:
            raise UnavailableError(self.router.failure)

    async def stop(self, *, drain_s: float | None = None) -> None:
        """Stop what has been started, in order, whatever has failed before. Idempotent."""
        patience_s = (self.config.router.drain_seconds if drain_s is None else drain_s) + STOP_SLACK_S
        if self._control is not None:
            await self._control.stop()
            self._control = None
        await self.router.stop(timeout_s=patience_s)
        if self._ray_started:
            self._ray_started = False
            await self.on_ray_thread(lambda: self.pools.stop(timeout_s=patience_s))
            await self.on_ray_thread(stop_ray)
        self._ray_thread.shutdown()
        if self.redis is not None:
            await asyncio.to_thread(self.redis.stop)
        if self._janitor is not None:
            await asyncio.to_thread(self._janitor.finish)
            self._janitor = None

    @contextlib.asynccontextmanager
    async def watching_ranks(self) -> AsyncGenerator[RegistryWatcher]:
        """The registry, looked at often."""
        url, secret = self.config.redis_url_or_embedded, self.config.cluster_secret()
        watcher = RegistryWatcher(redis_url=url, secret=secret, tls=PeerTls.of(self.config.tls), poll_s=POLL_S)
        await watcher.start()
        try:
            yield watcher
        finally:
            await watcher.stop()

    async def _router_is_ready(self, client: httpx.AsyncClient, *, ranks: int) -> bool:
        """It may learn of a rank a moment after its registration: an image would find no vision rank until then."""
        try:
            answers = [await client.get(f"{url}/readyz", timeout=2.0) for url in self.config.operator_urls]
        except httpx.HTTPError:
            return False
        return all(
            answer.is_success and sum(pool["ranks"] for pool in answer.json()["pools"].values()) >= ranks
            for answer in answers
        )

    async def on_ray_thread(self, call: Callable[[], Result]) -> Result:
        """Run what asks Ray for something."""
        return await asyncio.get_running_loop().run_in_executor(self._ray_thread, call)

    def _write_files(self) -> None:
        secret_file = self.run_dir / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(self.secret, encoding="utf-8")
        values = self.config.model_dump(mode="json", exclude_none=True)
        self.config_file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def _secret_of(config: ClusterConfig) -> str:
    """The one that is configured, else one that lives as long as this cluster."""
    if config.secret is None and config.secret_file is None:
        return mint_cluster_secret()
    return config.cluster_secret().text.decode()


def _describe(rank: RankInfo) -> str:
    return (
        f"{rank.rank_id} is ready on {rank.address}: {rank.load.slots_total} requests at a time, "
        f"{rank.load.blocks_total} blocks, context {rank.context_tokens_max} tokens"
    )
