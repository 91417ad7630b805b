"""A rank that cannot serve says why before it loads anything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import pytest
from prometheus_client import REGISTRY

from tests.services.rank_world import running_rank, until, world_config
from whalepod.cluster.config import METRICS_PORT_OFFSET, ClusterConfig
from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.liveness import HealthProber, Liveness
from whalepod.cluster.rank_process import rank_options
from whalepod.cluster.rank_server import rank_identity
from whalepod.cluster.registration import RankRole
from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity, Work
from whalepod.engine.rank import EngineRank
from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.services.prefill.process import run_prefill_rank


@pytest.mark.parametrize("offset", [0, METRICS_PORT_OFFSET])
async def test_a_port_in_use_is_named(redis_server: EmbeddedRedis, offset: int) -> None:
    config = world_config(redis_server.address.port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", config.decode.port + offset))
        other.listen()
        with pytest.raises(ConfigError, match=str(config.decode.port + offset)):
            async with running_rank(config, "decode"):
                pass
    async with running_rank(config, "decode"):
        pass


async def test_a_rank_waits_a_moment_for_the_port_of_the_one_before_it(redis_server: EmbeddedRedis) -> None:
    config = world_config(redis_server.address.port)
    predecessor = socket.socket()
    predecessor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    predecessor.bind(("127.0.0.1", config.decode.port))
    predecessor.listen()
    asyncio.get_running_loop().call_later(0.3, predecessor.close)
    async with running_rank(config, "decode") as rank:
        assert rank.info.address.endswith(str(config.decode.port))


async def test_what_cannot_fit_into_memory_is_refused_with_the_numbers(redis_server: EmbeddedRedis) -> None:
    config = world_config(redis_server.address.port, decode={"memory_gib": 0.000001})
    with pytest.raises(ConfigError, match="KV blocks"):
        async with running_rank(config, "decode"):
            pass


WarmUps = list[tuple[Work, tuple[Fidelity, ...]]]
COUNTED = ("generated_tokens_total", "finished_total", "step_seconds_count", "batch_rows_count", "dspark_steps_total")


@pytest.fixture
def warm_ups(monkeypatch: pytest.MonkeyPatch) -> WarmUps:
    """Every warm-up that was asked for, and done."""
    asked: WarmUps = []
    warm_up = EngineRank.warm_up

    def noted(rank: EngineRank, work: Work, fidelities: Sequence[Fidelity]) -> None:
        warm_up(rank, work, fidelities)
        asked.append((work, tuple(fidelities)))

    monkeypatch.setattr(EngineRank, "warm_up", noted)
    return asked


def counted() -> list[tuple[str, Mapping[str, str], float]]:
    """What the ranks of this process say that they have done."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return [
        (sample.name, sample.labels, sample.value)
        for sample in samples
        if sample.name.removeprefix("whalepod_rank_") in COUNTED
    ]


async def test_a_rank_is_ready_once_it_has_warmed_up(redis_server: EmbeddedRedis, warm_ups: WarmUps) -> None:
    before = counted()
    assert {name.removeprefix("whalepod_rank_") for name, _, _ in before} >= {"generated_tokens_total"}
    config = world_config(
        redis_server.address.port, engine={"warm_up": "on"}, fidelity={"allowed": ("fast",), "default": "fast"}
    )
    async with running_rank(config, "decode") as rank:
        assert warm_ups == [(Work.GENERATE, (Fidelity.FAST,))]
        assert rank.info.load.blocks_free == rank.info.load.blocks_total
        assert counted() == before
    async with running_rank(config, "prefill"):
        assert warm_ups[1:] == [(Work.PREFILL, (Fidelity.FAST,))]


@pytest.mark.parametrize("warm_up", ["auto", "off"])
async def test_a_rank_on_a_cpu_warms_up_only_if_it_must(
    redis_server: EmbeddedRedis, warm_ups: WarmUps, warm_up: str
) -> None:
    async with running_rank(world_config(redis_server.address.port, engine={"warm_up": warm_up}), "decode"):
        assert warm_ups == []


def group_config(redis_server: EmbeddedRedis) -> ClusterConfig:
    """Two prefill ranks that divide prompts, and would warm up if they were alone."""
    prefill: dict[str, object] = {"replicas": 2, "context_parallel": 2}
    return world_config(redis_server.address.port, engine={"warm_up": "on"}, prefill=prefill)


async def test_ranks_of_a_group_never_warm_up(redis_server: EmbeddedRedis, warm_ups: WarmUps) -> None:
    config = group_config(redis_server)
    async with AsyncExitStack() as stack:
        ranks = (running_rank(config, "prefill", index=index) for index in range(2))
        await asyncio.gather(*map(stack.enter_async_context, ranks))
        assert warm_ups == []


async def test_a_rank_that_waits_for_its_group_ends_when_it_is_told_to(redis_server: EmbeddedRedis) -> None:
    """The other one may have failed to start."""
    config, stop = group_config(redis_server), asyncio.Event()
    waiting = asyncio.create_task(run_prefill_rank(config, 0, stop=stop))
    prober = HealthProber()

    async def listens() -> bool:
        assert not waiting.done()
        return await prober.probe(f"127.0.0.1:{config.prefill.port}") is not Liveness.UNREACHABLE

    await until(listens)
    stop.set()
    async with asyncio.timeout(30):
        await waiting
    await prober.close()


async def test_a3_a_rank_with_other_blocks_does_not_join_and_both_are_named(redis_server: EmbeddedRedis) -> None:
    config = world_config(redis_server.address.port)
    other = config.model_copy(update={"engine": config.engine.model_copy(update={"block_tokens": 32})})
    async with running_rank(config, "decode"):
        with pytest.raises(ConfigError) as refusal:
            async with running_rank(other, "prefill"):
                pass
    assert "blocks of 16 tokens" in str(refusal.value)
    assert "blocks of 32 tokens" in str(refusal.value)


def test_a_rank_is_named_by_its_pool_and_place_and_listens_beside_its_neighbours() -> None:
    config = world_config(7000)
    first, third = (rank_identity(config, RankRole.DECODE, index) for index in (0, 2))
    assert (first.rank_id, third.rank_id) == ("decode-0", "decode-2")
    assert third.port == first.port + 2
    assert third.metrics_port == third.port + METRICS_PORT_OFFSET
    assert first.incarnation != third.incarnation
    assert rank_identity(config, RankRole.PREFILL_ENCODER, 1).rank_id == "prefill-1"


def test_each_pool_gives_its_ranks_its_own_limits() -> None:
    config = world_config(7000, prefill={"slots": 3, "chunk_tokens": 99}, decode={"slots": 7, "memory_gib": 1.0})
    model = ModelConfig.from_json(tiny_config_json(shipped_tokenizer()))
    prefill = rank_options(config, RankRole.PREFILL_FULL, model)
    decode = rank_options(config, RankRole.DECODE, model)
    assert (prefill.slots, prefill.chunk_tokens, prefill.memory_bytes) == (3, 99, None)
    assert (decode.slots, decode.memory_bytes) == (7, 2**30)
    assert prefill.speculation is None
    assert decode.speculation is not None
    assert decode.speculation.draft_tokens == model.dspark_block_size
    silent = world_config(7000, dspark={"draft_tokens": 0})
    assert rank_options(silent, RankRole.DECODE, model).speculation is None
    unsaid = world_config(7000, dspark={"draft_tokens": None})
    assert rank_options(unsaid, RankRole.DECODE, model).speculation is None, "on a CPU, without a calibration"
    gpu = world_config(7000, dspark={"draft_tokens": None}, engine={"device": "cuda"})
    assert rank_options(gpu, RankRole.DECODE, model).speculation is not None
    silent = world_config(7000, dspark={"draft_tokens": 0})
    assert rank_options(silent, RankRole.DECODE, model).speculation is None
