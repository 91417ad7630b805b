"""Prefill ranks that compute a prompt together, as processes, and what a lost rank costs."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from whalepod.client import AsyncClient
from whalepod.cluster.config import METRICS_PORT_OFFSET
from whalepod.core.clock import Deadline
from whalepod.engine.interface import Fidelity
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT_TOKENS = 700
SAMPLING = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def dividing(directory: Path) -> Iterator[ServedCluster]:
    flags = ("--prefill-context-parallel", "2", "--prefill-context-parallel-rows-min", "16", "--drain-seconds", "1")
    flags += ("--prefill-chunk-tokens", "128", "--decode-cpus", "0.2", "--prefill-cpus", "0.2")
    flags += ("--remote-prefill", "always")  # a rank that was struck has been slow, and prompts would go elsewhere
    with served_cluster(directory, *flags, prefill_ranks=2) as cluster:
        yield cluster


def drawn_prompts(count: int, *, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def metric(cluster: ServedCluster, name: str) -> float:
    """Of the head of the group; 0 while there is none."""
    port = cluster.config.prefill.port + METRICS_PORT_OFFSET
    try:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    except httpx.TransportError:
        return 0.0
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def rows(cluster: ServedCluster) -> float:
    """Of prompts, computed by the head alone or with its group, which may be forming anew."""
    return sum(metric(cluster, f'whalepod_context_rows_total{{how="{how}"}}') for how in ("divided", "alone"))


async def ask_all(
    cluster: ServedCluster, prompts: list[list[int]], strike: tuple[psutil.Process, signal.Signals] | None
) -> list[tuple[int, ...]]:
    """What the cluster says to each; a process is struck while the first prompts are computed."""

    async def ask(client: AsyncClient, prompt: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        async for delta in client.stream(prompt, sampling=SAMPLING, fidelity=Fidelity.EXACT):
            ids += delta.token_ids
        return tuple(ids)

    async with AsyncClient(f"127.0.0.1:{cluster.config.router.grpc_port}") as client:
        before = rows(cluster)
        asking = [asyncio.create_task(ask(client, prompt)) for prompt in prompts]
        if strike is not None:
            while await asyncio.to_thread(rows, cluster) == before:
                assert not all(task.done() for task in asking), "the prompts were computed elsewhere"
                await asyncio.sleep(0.01)
            os.kill(strike[0].pid, strike[1])
        return list(await asyncio.gather(*asking))


def said_alone(directory: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    llm = LLM(directory / "model", fidelity=Fidelity.EXACT)
    outputs = llm.generate(prompts, SAMPLING)
    llm.close()
    return [output.output.token_ids for output in outputs]


def wait_for_group(cluster: ServedCluster) -> None:
    """It is whole, and the router sends it prompts."""
    deadline = Deadline.after(90)
    with cluster.client() as client:
        while (
            metric(cluster, "whalepod_context_group_ranks") < 2
            or client.get("/readyz").json()["pools"]["prefill"]["ranks"] < 1
        ):
            assert not deadline.expired
            time.sleep(0.1)


def test_routers_see_one_prefill_rank_and_prompts_are_divided(directory: Path, dividing: ServedCluster) -> None:
    with dividing.client() as client:
        assert client.get("/readyz").json()["pools"]["prefill"]["ranks"] == 1
    prompts = drawn_prompts(3, seed=0)
    assert asyncio.run(ask_all(dividing, prompts, None)) == said_alone(directory, prompts)
    assert metric(dividing, 'whalepod_context_rows_total{how="divided"}') > 3 * PROMPT_TOKENS / 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("index", [1, 0])
def test_no_prompt_is_lost_with_a_rank_of_the_group_which_forms_again(
    directory: Path, dividing: ServedCluster, index: int, number: signal.Signals
) -> None:
    """A lost member: the head computes alone. A lost head: the router sends its prompts elsewhere."""
    wait_for_group(dividing)
    prompts = drawn_prompts(4, seed=2 + 2 * index + (number is signal.SIGSTOP))
    victim = psutil.Process(dividing.pid_on_port(dividing.config.prefill.port + index))
    assert asyncio.run(ask_all(dividing, prompts, (victim, number))) == said_alone(directory, prompts)
    deadline = Deadline.after(60)
    while dividing.try_pid_on_port(dividing.config.prefill.port + index) in (None, victim.pid):
        assert not deadline.expired, "the lost rank was not started again"
        time.sleep(0.1)
    if index == 1:
        wait_for_group(dividing)
