"""Changes of pools over the real socket. Ray and the registry are stood in for: a rank that starts is registered."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.local import LocalCluster
from whalepod.cluster.pool_control import PoolControl, ask_pool_control
from whalepod.cluster.pools import RankPlace
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId


class StandIn:
    """A cluster without processes. `happened` is what was done to its ranks, in order."""

    def __init__(self, config: ClusterConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.ranks = {RankId(f"decode-{index}"): index for index in range(config.decode.replicas)}
        self.happened: list[str] = []
        self.broken: set[RankId] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.pools = SimpleNamespace(
            start_rank=self._start, ask_to_stop=self._stop, has_ended=lambda rank_id: rank_id not in self.ranks,
            forget=lambda rank_id: self.happened.append(f"forget {rank_id}"),
            failures=lambda: dict.fromkeys(self.broken, "its port is taken"),
        )  # fmt: skip

    def _start(self, place: RankPlace, config: ClusterConfig | None) -> None:
        self.happened.append(f"start {place.rank_id}")
        if place.rank_id not in self.broken:
            self.ranks[place.rank_id] = place.index
        assert config is None or config.decode.replicas > place.index

    def _stop(self, rank_id: RankId) -> None:
        self.happened.append(f"stop {rank_id}")
        del self.ranks[rank_id]

    async def on_ray_thread(self, call: Callable[[], Any]) -> Any:
        await self.gate.wait()
        return call()

    @asynccontextmanager
    async def watching_ranks(self) -> AsyncGenerator[Any]:
        async def poll() -> None: ...

        yield SimpleNamespace(ranks=self.ranks, poll=poll)

    def use(self, config: ClusterConfig) -> None:
        self.config = config


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # a socket's path is short
        yield Path(directory)


@asynccontextmanager
async def controlled(run_dir: Path, **decode: Any) -> AsyncGenerator[StandIn]:
    cluster = StandIn(ClusterConfig.model_validate({"decode": decode}), run_dir)
    control = await PoolControl(cast(LocalCluster, cluster)).start()
    yield cluster
    await control.stop()


async def ask(run_dir: Path, **request: object) -> list[str]:
    return [line async for line in ask_pool_control(run_dir, request)]


async def test_ranks_are_added_at_the_end_and_taken_away_from_there(run_dir: Path) -> None:
    async with controlled(run_dir, replicas=1) as cluster:
        said = await ask(run_dir, do="scale", pool="decode", replicas=3)
        assert cluster.happened == ["start decode-1", "start decode-2"]
        assert said[-1] == "decode has 3 ranks"
        assert cluster.config.decode.replicas == 3
        cluster.happened.clear()
        await ask(run_dir, do="scale", pool="decode", replicas=1)
        assert cluster.happened == ["stop decode-2", "forget decode-2", "stop decode-1", "forget decode-1"]


async def test_ranks_are_replaced_one_after_another(run_dir: Path) -> None:
    async with controlled(run_dir, replicas=2) as cluster:
        await ask(run_dir, do="replace", pool="decode")
        each = [[f"stop decode-{n}", f"forget decode-{n}", f"start decode-{n}"] for n in range(2)]
        assert cluster.happened == each[0] + each[1]


async def test_a_rank_that_does_not_start_is_told_and_nothing_of_it_is_left(run_dir: Path) -> None:
    async with controlled(run_dir, replicas=1) as cluster:
        cluster.broken.add(RankId("decode-1"))
        with pytest.raises(UnavailableError, match="decode-1 did not start: its port is taken"):
            await ask(run_dir, do="scale", pool="decode", replicas=2)
        assert cluster.happened == ["start decode-1", "forget decode-1"]
        assert cluster.config.decode.replicas == 1


async def test_what_cannot_be_is_refused_with_its_reason_before_anything_happens(run_dir: Path) -> None:
    async with controlled(run_dir, replicas=2, expert_parallel=True) as cluster:
        with pytest.raises(UnavailableError, match="shares its experts over 2 ranks"):
            await ask(run_dir, do="scale", pool="decode", replicas=3)
        with pytest.raises(UnavailableError, match=r"prefill\.replicas: .*greater than or equal to 0"):
            await ask(run_dir, do="scale", pool="prefill", replicas=-1)
        assert cluster.happened == []


async def test_one_change_at_a_time(run_dir: Path) -> None:
    async with controlled(run_dir, replicas=1) as cluster:
        cluster.gate.clear()
        first = asyncio.create_task(ask(run_dir, do="scale", pool="decode", replicas=2))
        await asyncio.sleep(0.1)
        with pytest.raises(UnavailableError, match="another change"):
            await ask(run_dir, do="replace", pool="decode")
        cluster.gate.set()
        await first


async def test_a_cluster_that_is_gone_is_told(run_dir: Path) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        await ask(run_dir, do="replace", pool="decode")
