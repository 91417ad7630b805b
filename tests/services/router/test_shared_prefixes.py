"""A prefix that is being computed is waited for and not computed again, through the whole router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import (
    RouterUnderTest,
    answer_to,
    check_nothing_is_left,
    running_router,
    until,
)
from whalepod.core.errors import UnavailableError

CONTEXT_TOKENS = 15_500
PREAMBLE = [400 + index % 90 for index in range(1500)]
LONG_PREAMBLE = PREAMBLE * 10


def prompts(count: int, preamble: list[int] = PREAMBLE) -> list[list[int]]:
    """The same beginning, and 10 tokens of their own."""
    return [preamble + [500 + index] * 10 for index in range(count)]


def computed(prefill: FakePrefill, preamble: list[int]) -> int:
    """How many prompts a prefill rank had to compute from the beginning."""
    return sum(ticket.stored_tokens_hint < len(preamble) // 2 for ticket in prefill.seen.tickets)


@pytest.mark.parametrize(
    ("requests", "ranks", "preamble"),
    [(60, 2, PREAMBLE), pytest.param(500, 2, LONG_PREAMBLE, marks=pytest.mark.slow)],
    ids=["60", "500 of 15,000 tokens"],
)
async def test_cold_requests_compute_their_common_preamble_once(
    model_dir: Path, requests: int, ranks: int, preamble: list[int]
) -> None:
    prefills = [FakePrefill(f"prefill-{index}") for index in range(ranks)]
    decodes = [FakeDecode(f"decode-{index}") for index in range(2)]
    for decode in decodes:
        decode.server.slots_total = 300
    everyone = [*prefills, *decodes]
    for rank in everyone:
        rank.server.context_tokens_max = CONTEXT_TOKENS
    limits: dict[str, Any] = {"max_concurrent_requests": 600, "request_timeout_seconds": 120.0}
    async with running_router(model_dir, everyone, context_tokens_max=CONTEXT_TOKENS, **limits) as router:
        for prefill in prefills:
            prefill.behaviour.step = asyncio.Event()
        asked = prompts(requests, preamble)
        asking = [asyncio.create_task(answer_to(router, prompt)) for prompt in asked]
        await until(lambda: router.front.admission.running == requests, timeout_s=60.0)
        for prefill in prefills:
            assert prefill.behaviour.step is not None
            prefill.behaviour.step.set()
        assert await asyncio.gather(*asking) == [expected_ids(prompt, 6) for prompt in asked]
        assert sum(computed(prefill, preamble) for prefill in prefills) == 1
        assert sum(len(decode.seen.starts) for decode in decodes) == requests
        await check_nothing_is_left(router, *prefills, *decodes)


async def test_when_the_one_that_computes_is_lost_another_takes_over(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.step = asyncio.Event()
    prefill.behaviour.refuse_with = UnavailableError("not now")
    asked = prompts(6)
    asking = [asyncio.create_task(answer_to(router, prompt)) for prompt in asked]
    await until(lambda: router.front.admission.running == 6 and prefill.seen.starts)
    assert len(prefill.seen.starts) == 1
    first, prefill.behaviour.step = prefill.behaviour.step, asyncio.Event()
    prefill.behaviour.refuse_with = None
    prefill.behaviour.step.set()
    first.set()
    assert await asyncio.gather(*asking) == [expected_ids(prompt, 6) for prompt in asked]
    await check_nothing_is_left(router, decode, prefill)


async def test_a_client_that_leaves_takes_nobody_with_it(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.hang = True
    asked = prompts(3)
    leaving = asyncio.create_task(answer_to(router, asked[0]))
    await until(lambda: prefill.running)
    asking = [asyncio.create_task(answer_to(router, prompt)) for prompt in asked[1:]]
    await until(lambda: router.front.admission.running == 3)
    prefill.behaviour.hang = False
    leaving.cancel()
    assert await asyncio.gather(*asking) == [expected_ids(prompt, 6) for prompt in asked[1:]]
    await check_nothing_is_left(router, decode, prefill)


async def test_choices_of_one_prompt_run_on_the_same_ranks_at_the_same_time(model_dir: Path) -> None:
    decodes = [FakeDecode(f"decode-{index}") for index in range(3)]
    prefills = [FakePrefill(f"prefill-{index}") for index in range(2)]
    async with running_router(model_dir, [*decodes, *prefills]) as router:
        await router.complete(prompt=PREAMBLE, max_tokens=3, n=4, temperature=1, seed=1)
        assert sorted(len(decode.seen.starts) for decode in decodes) == [0, 0, 4]
        assert sorted(len(prefill.seen.starts) for prefill in prefills) == [0, 4]


async def test_a_session_stays_on_its_rank(model_dir: Path) -> None:
    decodes = [FakeDecode(f"decode-{index}") for index in range(4)]
    async with running_router(model_dir, decodes, prefill_replicas=0) as router:
        for _ in range(8):
            body = {"prompt": [401, 402], "max_tokens": 2}
            await router.http.post("/v1/completions", json=body, headers={"X-Session-ID": "a chat"})
        assert sorted(len(decode.seen.starts) for decode in decodes) == [0, 0, 0, 8]
