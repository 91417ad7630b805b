"""Decode ranks that share the experts lose one of them, or Ray's head, under streams: all others go on in place."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_pool import decode_ranks
from whalepod.client import AsyncClient
from whalepod.core.clock import Deadline
from whalepod.engine.interface import Fidelity
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 4
STREAMS = 8
SAMPLING = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
TOKENS_BEFORE = 4


@dataclass(slots=True)
class Stream:
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    attempts: int = 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


@pytest.fixture(scope="module")
def sharing(directory: Path) -> Iterator[ServedCluster]:
    flags = ("--decode-replicas", str(RANKS), "--decode-expert-parallel", "--decode-redundant-experts", str(RANKS))
    flags += ("--decode-cpus", "0.2", "--prefill-cpus", "0.2", "--drain-seconds", "0")
    flags += ("--queue-timeout-seconds", "200")  # four ranks that start again at a time may take a while
    with served_cluster(directory, *flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wanted(directory: Path, sharing: ServedCluster) -> list[tuple[int, ...]]:
    """What one process that holds all experts answers."""
    assert sharing.process.poll() is None
    llm = LLM(directory / "model", fidelity=Fidelity.EXACT)
    outputs = llm.generate([stream.prompt for stream in drawn_streams()], SAMPLING)
    llm.close()
    return [output.output.token_ids for output in outputs]


def drawn_streams() -> list[Stream]:
    draw = random.Random(0)
    return [Stream([draw.randrange(300, 4000) for _ in range(24)]) for _ in range(STREAMS)]


async def ask(client: AsyncClient, stream: Stream) -> None:
    async for delta in client.stream(stream.prompt, sampling=SAMPLING, fidelity=Fidelity.EXACT):
        stream.ids += delta.token_ids
        stream.attempts = delta.attempts or stream.attempts


async def struck(cluster: ServedCluster, number: signal.Signals, *processes: psutil.Process) -> list[Stream]:
    """Streams that have ended, of which all had begun when the processes were struck."""
    streams = drawn_streams()
    async with AsyncClient(f"127.0.0.1:{cluster.config.router.grpc_port}") as client:
        asking = [asyncio.create_task(ask(client, stream)) for stream in streams]
        while any(len(stream.ids) < TOKENS_BEFORE for stream in streams):
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.02)
        for process in processes:
            os.kill(process.pid, number)
        await asyncio.gather(*asking)
    return streams


def wait_for_group(cluster: ServedCluster) -> None:
    deadline = Deadline.after(90)
    while decode_ranks(cluster) < RANKS:
        assert not deadline.expired
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_only_the_streams_of_a_lost_rank_move(
    sharing: ServedCluster, wanted: list[tuple[int, ...]], number: signal.Signals
) -> None:
    wait_for_group(sharing)
    victim = psutil.Process(sharing.pid_on_port(sharing.config.decode.port + 1))
    streams = asyncio.run(struck(sharing, number, victim))
    assert [tuple(stream.ids) for stream in streams] == wanted
    moved = sum(stream.attempts > 1 for stream in streams)
    assert 0 < moved <= STREAMS // RANKS, [stream.attempts for stream in streams]
    gone = Deadline.after(30)
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        assert not gone.expired, "a hung rank was not ended"


def test_streams_wait_for_their_ranks_when_all_are_told_to_stop(
    sharing: ServedCluster, wanted: list[tuple[int, ...]]
) -> None:
    """Ray starts them again, and they are a group only once all are there."""
    wait_for_group(sharing)
    port = sharing.config.decode.port
    ranks = [psutil.Process(sharing.pid_on_port(port + index)) for index in range(RANKS)]
    streams = asyncio.run(struck(sharing, signal.SIGTERM, *ranks))
    assert [tuple(stream.ids) for stream in streams] == wanted
    assert any(stream.attempts > 1 for stream in streams)


def test_no_stream_moves_without_the_ray_head(sharing: ServedCluster, wanted: list[tuple[int, ...]]) -> None:
    """The last one: no rank is started again after it."""
    wait_for_group(sharing)
    (head,) = (process for process in sharing.descendants() if process.name() == "gcs_server")
    streams = asyncio.run(struck(sharing, signal.SIGKILL, head))
    assert [tuple(stream.ids) for stream in streams] == wanted
    assert [stream.attempts for stream in streams] == [1] * STREAMS
