"""A prefill rank that is asked to stop under load, as SIGTERM asks it: no request notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.own_ports import with_own_ports
from tests.services.rank_world import SECRET, prompt_of, until
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.registration import RankInfo
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint
from whalepod.services.decode.process import run_decode_rank
from whalepod.services.prefill.process import run_prefill_rank
from whalepod.services.router.process import run_router

pytestmark = pytest.mark.slow

CLIENTS = 6


@asynccontextmanager
async def prefill_rank(config: ClusterConfig, index: int) -> AsyncGenerator[tuple[asyncio.Event, asyncio.Task[None]]]:
    ready: asyncio.Future[RankInfo] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(run_prefill_rank(config, index, stop=stop, on_ready=ready.set_result))
    await ready
    try:
        yield stop, task
    finally:
        stop.set()
        await task


async def until_listening(router: asyncio.Task[None], listening: asyncio.Event) -> None:
    waiting = asyncio.create_task(listening.wait())
    await asyncio.wait((router, waiting), return_when=asyncio.FIRST_COMPLETED)
    if router.done():
        waiting.cancel()
        await router


@asynccontextmanager
async def decode_and_router(config: ClusterConfig) -> AsyncGenerator[httpx.AsyncClient]:
    ready: asyncio.Future[RankInfo] = asyncio.get_running_loop().create_future()
    stop, listening = asyncio.Event(), asyncio.Event()
    decode = asyncio.create_task(run_decode_rank(config, 0, stop=stop, on_ready=ready.set_result))
    await ready
    router = asyncio.create_task(run_router(config, stop=stop, on_ready=listening.set))
    await until_listening(router, listening)
    url = f"http://127.0.0.1:{config.router.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        try:
            yield client
        finally:
            stop.set()
            await asyncio.gather(router, decode)


@pytest.mark.parametrize("replicas", [1, 2], ids=["decode computes", "another takes over"])
async def test_no_request_fails_while_a_prefill_rank_leaves_under_load(
    redis_port: int, tmp_path: Path, replicas: int
) -> None:
    write_tiny_checkpoint(tmp_path / "model")
    asked = {"model": str(tmp_path / "model"), "secret": SECRET, "prefill": {"replicas": replicas, "chunk_tokens": 64}}
    config = with_own_ports(ClusterConfig.model_validate(asked)).model_copy(update={"redis_port": redis_port})
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(prefill_rank(config, index)) for index in range(replicas)]
        client = await stack.enter_async_context(decode_and_router(config))

        async def ready() -> bool:
            return (await client.get("/readyz")).json()["pools"]["prefill"]["ranks"] == replicas

        await until(ready)
        leaving, gone = ranks[0]
        answered = 0

        async def ask_until_gone(seed: int) -> None:
            nonlocal answered
            after = 0
            while after < 2:  # and twice more without it
                after += gone.done()
                seed += CLIENTS
                body = {"prompt": prompt_of(150, seed=seed), "max_tokens": 4, "stream": True, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, await response.aread()
                    events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
                assert events[-1] == "[DONE]", events
                assert not any("error" in json.loads(event) for event in events[:-1]), events
                answered += 1
                if answered == 2 * CLIENTS:
                    leaving.set()

        await asyncio.gather(*(ask_until_gone(seed) for seed in range(CLIENTS)))
        assert gone.done()
        assert gone.exception() is None
        assert answered >= 4 * CLIENTS
