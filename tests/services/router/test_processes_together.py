"""Several router processes (`router.processes`) behave as one: what is limited, what is computed, who is killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import FakeRank, until
from tests.services.router.test_process import body, config, registered
from tests.services.router.test_processes import WAIT_S, Processes
from tests.services.router.test_shared_prefixes import CONTEXT_TOKENS, LONG_PREAMBLE, computed, prompts
from whalepod.cluster.config import ClusterConfig

__all__ = ["config"]

pytestmark = pytest.mark.slow


@asynccontextmanager
async def started(
    config: ClusterConfig,
    directory: Path,
    ranks: Sequence[FakeRank],
    *,
    count: int,
    **router: Any,
) -> AsyncGenerator[tuple[Processes, httpx.AsyncClient, psutil.Process]]:
    """So many processes that are ready, a client of them, and their parent."""
    processes = Processes(config, directory, count, **router)
    try:
        async with registered(config, ranks), client_of(config) as client:
            parent = await processes.start()
            await processes.until_all_are_ready()
            yield processes, client, psutil.Process(parent.pid)
    finally:
        await processes.end()
        assert "Traceback" not in processes.log, processes.log


def client_of(config: ClusterConfig) -> httpx.AsyncClient:
    """As many requests at a time as are asked."""
    url, limits = f"http://127.0.0.1:{config.router.http_port}", httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=2 * WAIT_S, trust_env=False, limits=limits)


async def running(processes: Processes) -> list[int]:
    """How many requests each process has past its queue."""
    return await _gauge(processes, "whalepod_router_requests_running")


async def _gauge(processes: Processes, name: str) -> list[int]:
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as operator:
        pages = [(await operator.get(f"{page}/metrics")).text for page in processes.pages]
    found = [re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE) for page in pages]
    return [int(float(match[1])) if match else 0 for match in found]


async def until_running(processes: Processes, count: int) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        while sum(now := await running(processes)) != count:
            await asyncio.sleep(0.02)
    return now


async def post(client: httpx.AsyncClient, *, tenant: str = "a", **fields: Any) -> httpx.Response:
    """Over a connection of its own, which the kernel gives to any of them."""
    headers = {"x-tenant-id": tenant, "connection": "close"}
    return await client.post("/v1/completions", json=body(**fields), headers=headers)


@pytest.mark.parametrize("count", [2, 3])
async def test_cold_requests_at_all_processes_compute_their_common_preamble_once(
    config: ClusterConfig,
    tmp_path: Path,
    count: int,
) -> None:
    prefills = [FakePrefill(f"prefill-{index}") for index in range(2)]
    decodes = [FakeDecode(f"decode-{index}") for index in range(2)]
    for rank in [*prefills, *decodes]:
        rank.server.context_tokens_max = CONTEXT_TOKENS
        rank.server.slots_total = 300
    for prefill in prefills:
        prefill.behaviour.step = asyncio.Event()
    engine = config.engine.model_copy(update={"context_tokens_max": CONTEXT_TOKENS})
    config = config.model_copy(update={"engine": engine})
    asked = prompts(500, LONG_PREAMBLE)
    all_of_it = started(config, tmp_path, [*prefills, *decodes], count=count, max_concurrent_requests=600)
    async with all_of_it as (processes, client, _):
        asking = [asyncio.create_task(post(client, prompt=prompt, max_tokens=6)) for prompt in asked]
        assert min(await until_running(processes, len(asked))) > 0
        for prefill in prefills:
            assert prefill.behaviour.step is not None
            prefill.behaviour.step.set()
        answers = await asyncio.gather(*asking)
        assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [
            expected_ids(prompt, 6) for prompt in asked
        ]
        assert sum(computed(prefill, LONG_PREAMBLE) for prefill in prefills) == 1, "none lost its patience"


async def test_tenants_and_the_bound_are_limited_once_for_all_processes(
    config: ClusterConfig,
    tmp_path: Path,
) -> None:
    decode = FakeDecode(behaviour=Behaviour(step=asyncio.Event()))
    decode.server.slots_total = 300
    limits = {"trust_tenant_header": True, "tenant_requests_per_minute": 12, "tenant_concurrent_requests": 9}
    bound = {"max_concurrent_requests": 10, "queue_size": 6}
    async with started(config, tmp_path, [decode], count=2, **limits, **bound) as (processes, client, _):
        asking = [asyncio.create_task(post(client, tenant="a")) for _ in range(20)]
        await until(lambda: sum(task.done() for task in asking) == 11, timeout_s=WAIT_S)
        assert {task.result().status_code for task in asking if task.done()} == {429}
        assert min(await until_running(processes, 9)) > 0
        asking += [asyncio.create_task(post(client, tenant=f"of many {index}")) for index in range(20)]
        await until(lambda: sum(task.done() for task in asking) == 11 + 13, timeout_s=WAIT_S)
        assert sum(await _gauge(processes, "whalepod_router_requests_waiting")) == 6
        assert sum(await running(processes)) == 10
        assert decode.behaviour.step is not None
        decode.behaviour.step.set()
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers].count(200) == 9 + 1 + 6
        decode.behaviour = Behaviour()
        assert [(await post(client, tenant="a")).status_code for _ in range(4)].count(200) == 12 - 9


async def test_a_process_that_is_killed_leaves_its_requests_places_and_its_prefix_to_others(
    config: ClusterConfig,
    tmp_path: Path,
) -> None:
    """Whoever waits for a prefix that it computed goes on at once, and what it ran counts no more."""
    prefill, decode = FakePrefill(behaviour=Behaviour(step=asyncio.Event())), FakeDecode()
    for rank in (prefill, decode):
        rank.server.slots_total = 300
    limits = {"trust_tenant_header": True, "tenant_concurrent_requests": 20, "max_concurrent_requests": 20}
    settings = {"queue_size": 0}
    async with started(config, tmp_path, [prefill, decode], count=2, **limits, **settings) as (
        processes,
        client,
        parent,
    ):
        asked = prompts(20)
        asking = [asyncio.create_task(post(client, prompt=prompt)) for prompt in asked]
        here = await until_running(processes, 20)
        assert min(here) > 0
        await until(lambda: len(prefill.seen.tickets) == 1, timeout_s=WAIT_S)
        computing = (await _gauge(processes, "whalepod_router_placement_seconds_count")).index(1)
        assert (await post(client, prompt=asked[0])).status_code == 429
        (victim,) = [child for child in parent.children() if child.cmdline()[-1] == str(computing)]
        victim.kill()
        await until(lambda: sum(task.done() for task in asking) == here[computing], timeout_s=WAIT_S)
        await until(lambda: len(prefill.seen.tickets) == 2, timeout_s=WAIT_S)
        await processes.until_all_are_ready()
        again = [asyncio.create_task(post(client, prompt=asked[0])) for _ in range(here[computing])]
        await until_running(processes, 20)
        assert (await post(client, prompt=asked[0])).status_code == 429
        assert prefill.behaviour.step is not None
        prefill.behaviour.step.set()
        answers = await asyncio.gather(*asking, *again, return_exceptions=True)
        served = [answer.status_code for answer in answers if isinstance(answer, httpx.Response)]
        assert served == [200] * 20
        assert sum(isinstance(answer, httpx.HTTPError) for answer in answers) == here[computing]
