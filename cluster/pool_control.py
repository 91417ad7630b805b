"""Changes to the pools of a cluster that serves: more ranks, fewer, new processes for all of them, one after another.

whalepod pool … ─ one JSON line ─▶ Unix socket in the cluster's directory, which is its user's alone
                ◀─ lines of {"say": …}, then {"done": true} or {"error": …} ─
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError

from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError, ServingError, UnavailableError
from whalepod.core.ids import RankId

from .config import ClusterConfig
from .pool_settings import VisionSettings
from .pools import RankPlace

if TYPE_CHECKING:
    from .local import LocalCluster

log = logging.getLogger(__name__)

SOCKET_NAME = "control.sock"
POLL_S = 0.1
READY_S = 120.0
STOP_SLACK_S = 10.0

Say = Callable[[str], None]


class PoolControl:
    """One change at a time."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._server: asyncio.Server | None = None
        self._changing = asyncio.Lock()

    async def start(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._cluster.run_dir / SOCKET_NAME)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def scale(self, pool: str, replicas: int, say: Say) -> None:
        """Start the ranks that are missing, or drain those with the highest numbers. Raises ConfigError and
        UnavailableError; ranks that were started or stopped before that stay so."""
        config = _scaled(self._cluster.config, pool, replicas)
        before = _replicas(self._cluster.config, pool)
        for index in range(before, replicas):
            await self._start(RankPlace(pool, index), config, say)
        for index in range(before - 1, replicas - 1, -1):
            await self._stop(RankPlace(pool, index), say)
        self._cluster.use(config)
        say(f"{pool} has {replicas} ranks")

    async def replace(self, pool: str, say: Say) -> None:
        """A new process for every rank, one after another: each drains, and the next waits until it is back."""
        for index in range(_replicas(self._cluster.config, pool)):
            place = RankPlace(pool, index)
            await self._stop(place, say)
            await self._start(place, None, say)
        say(f"every rank of {pool} has been replaced")

    async def _start(self, place: RankPlace, config: ClusterConfig | None, say: Say) -> None:
        cluster = self._cluster
        say(f"starting {place.rank_id}")
        await cluster.on_ray_thread(lambda: cluster.pools.start_rank(place, config))
        deadline = Deadline.after(READY_S)
        async with cluster.watching_ranks() as watcher:
            while place.rank_id not in watcher.ranks:
                failures = await cluster.on_ray_thread(cluster.pools.failures)
                if place.rank_id in failures:
                    await cluster.on_ray_thread(lambda: cluster.pools.forget(place.rank_id))
                    raise UnavailableError(f"{place.rank_id} did not start: {failures[place.rank_id]}")
                if deadline.expired:
                    raise UnavailableError(f"{place.rank_id} is not ready after {READY_S:g} s")
                await asyncio.sleep(POLL_S)
        say(f"{place.rank_id} is ready")

    async def _stop(self, place: RankPlace, say: Say) -> None:
        cluster, rank_id = self._cluster, place.rank_id
        say(f"draining {rank_id}")
        await cluster.on_ray_thread(lambda: cluster.pools.ask_to_stop(rank_id))
        deadline = Deadline.after(cluster.config.router.drain_seconds + STOP_SLACK_S)
        while not deadline.expired and not await cluster.on_ray_thread(lambda: cluster.pools.has_ended(rank_id)):
            await asyncio.sleep(POLL_S)
        await cluster.on_ray_thread(lambda: cluster.pools.forget(rank_id))
        await self._until_unregistered(rank_id)
        say(f"{rank_id} has ended")

    async def _until_unregistered(self, rank_id: RankId) -> None:
        """A rank that did not end by itself is dropped from the registry when it has been silent for a while."""
        deadline = Deadline.after(READY_S)
        async with self._cluster.watching_ranks() as watcher:
            await watcher.poll()
            while rank_id in watcher.ranks and not deadline.expired:
                await asyncio.sleep(POLL_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(**message: object) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        def say(text: str) -> None:
            log.info("%s", text)
            tell(say=text)

        try:
            request = json.loads(await reader.readline())
            if self._changing.locked():
                raise UnavailableError("another change of the pools is under way")
            async with self._changing:
                if request["do"] == "scale":
                    await self.scale(request["pool"], request["replicas"], say)
                else:
                    await self.replace(request["pool"], say)
            tell(done=True)
        except (ConfigError, ServingError, ValueError, KeyError) as error:
            tell(error=str(error))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()


async def ask_pool_control(run_dir: Path, request: dict[str, object]) -> AsyncIterator[str]:
    """What the cluster in `run_dir` says while it does this. Raises UnavailableError if it is not there, or fails."""
    try:
        reader, writer = await asyncio.open_unix_connection(run_dir / SOCKET_NAME)
    except OSError as error:
        raise UnavailableError(f"the cluster in {run_dir} does not answer: {error}") from None
    writer.write(json.dumps(request).encode() + b"\n")
    async for line in reader:
        message = json.loads(line)
        if "error" in message:
            raise UnavailableError(message["error"])
        if "done" in message:
            return
        yield message["say"]
    raise UnavailableError("the cluster has gone before it was done")


def _replicas(config: ClusterConfig, pool: str) -> int:
    return config.pool(pool).replicas


def _scaled(config: ClusterConfig, pool: str, replicas: int) -> ClusterConfig:
    """Raises ConfigError."""
    settings = config.pool(pool)
    if isinstance(settings, VisionSettings) and (replicas == 0) != (settings.replicas == 0):
        raise ConfigError("whether there are vision ranks is set at start: the others encode images if there are none")
    if not isinstance(settings, VisionSettings) and settings.expert_parallel and replicas != settings.replicas:
        raise ConfigError(f"{pool} shares its experts over {settings.replicas} ranks: their number is set at start")
    if pool == "prefill" and config.prefill.context_parallel > 1 and replicas != config.prefill.replicas:
        raise ConfigError("prefill ranks divide prompts (prefill.context_parallel): their number is set at start")
    values = config.model_dump()
    values[pool]["replicas"] = replicas
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or pool}: {each['msg']}" for each in error.errors()]
        raise ConfigError("; ".join(problems)) from None
