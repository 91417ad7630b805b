"""Ranks that refuse, die and repeat themselves: a right answer or the truth, in time, and nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import (
    RouterUnderTest,
    answer_to,
    check_nothing_is_left,
    failure_of,
    running_router,
    until,
)
from whalepod.core.errors import (
    AuthenticationError,
    CapacityError,
    DrainingError,
    InternalError,
    InvalidFieldError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)

LONG = [400 + index % 90 for index in range(100)]
SHORT = LONG[:5]
RIGHT = expected_ids(LONG, 6)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
@pytest.mark.parametrize("error", [CapacityError("full"), DrainingError("draining"), WorkerLostError("stopped")])
async def test_a_decode_rank_that_refuses_is_replaced_by_another(
    model_dir: Path, prefill: FakePrefill, prompt: list[int], error: ServingError
) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    async with running_router(model_dir, [*ranks, prefill]) as router:
        ranks[0].behaviour.refuse_with = error
        for _ in range(6):
            assert await answer_to(router, prompt) == expected_ids(prompt, 6)
        assert len(ranks[1].seen.starts) == 6
        await check_nothing_is_left(router, *ranks, prefill)


async def test_a_header_names_the_decode_rank_and_one_that_is_not_there_is_refused(model_dir: Path) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(3)]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        body = {"prompt": SHORT, "max_tokens": 2}
        for name in ("X-data-parallel-rank", "x_data_parallel_rank"):
            for _ in range(4):
                assert (await router.http.post("/v1/completions", json=body, headers={name: "1"})).is_success
        assert [len(rank.seen.starts) for rank in ranks] == [0, 8, 0]
        for value in ("3", "-1", "one"):
            refused = await router.http.post("/v1/completions", json=body, headers={"X-Data-Parallel-Rank": value})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "x-data-parallel-rank"
            assert "decode-0, decode-1, decode-2" in refused.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_a_decode_rank_that_dies_before_its_first_token_is_replaced_by_another(
    model_dir: Path, prefill: FakePrefill, prompt: list[int]
) -> None:
    mortal, other = FakeDecode("decode-0", Behaviour(die_after_tokens=0)), FakeDecode("decode-1")
    async with running_router(model_dir, [mortal, other, prefill]) as router:
        while not mortal.seen.starts:
            prompt = [prompt[0] + 1, *prompt[1:]]  # where one was answered, the same one goes again
            assert await answer_to(router, prompt) == expected_ids(prompt, 6)
        assert other.seen.starts[-1].request_id == mortal.seen.starts[-1].request_id
        assert (mortal.seen.starts[-1].attempt, other.seen.starts[-1].attempt) == (1, 2)
        await check_nothing_is_left(router, mortal, other, prefill)


async def test_the_only_decode_rank_may_restart_before_its_first_token(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    decode.behaviour.hang = True
    asking = asyncio.create_task(answer_to(router, SHORT))
    await until(lambda: decode.live)
    await decode.server.kill()
    decode.behaviour.hang = False
    await decode.server.restart()
    assert await asking == expected_ids(SHORT, 6)
    await check_nothing_is_left(router, decode, prefill)


async def test_a_decode_rank_that_never_comes_back_ends_the_request_with_the_truth(
    model_dir: Path, decode: FakeDecode
) -> None:
    decode.behaviour.hang = True
    async with running_router(model_dir, [decode], prefill_replicas=0, queue_timeout_seconds=0.5) as router:
        asking = asyncio.create_task(failure_of(router, SHORT))
        await until(lambda: decode.live)
        await decode.server.kill()
        assert await asking == (503, "unavailable")
        await check_nothing_is_left(router)


async def test_no_more_attempts_than_allowed_are_made(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.refuse_with = UnavailableError("not now")
    async with running_router(model_dir, [decode], prefill_replicas=0, retry_max=2) as router:
        assert await failure_of(router, SHORT) == (503, "unavailable")
        assert [work.attempt for work in decode.seen.starts] == [1, 2, 3]


async def test_a1_a_request_waits_for_room_on_the_only_rank(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.refuse_with = CapacityError("full")
    asking = asyncio.create_task(answer_to(router, SHORT))
    await until(lambda: len(decode.seen.starts) == 4)
    decode.behaviour.refuse_with = None
    assert await asking == expected_ids(SHORT, 6)
    await check_nothing_is_left(router, decode)


async def test_a_rank_that_stays_full_ends_the_request_when_its_time_in_the_queue_is_over(
    model_dir: Path, decode: FakeDecode
) -> None:
    decode.behaviour.refuse_with = CapacityError("full", retry_after_s=3)
    async with running_router(model_dir, [decode], prefill_replicas=0, queue_timeout_seconds=0.5) as router:
        response = await router.http.post("/v1/completions", json={"prompt": SHORT, "max_tokens": 6})
        assert (response.status_code, response.headers["retry-after"]) == (503, "3")


async def test_a1_no_more_requests_are_sent_than_the_ranks_take_at_a_time(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.step = asyncio.Event()
    async with running_router(model_dir, [decode], prefill_replicas=0) as router:
        asking = [asyncio.create_task(answer_to(router, SHORT)) for _ in range(20)]
        await until(lambda: len(decode.seen.starts) == 16)  # twice its 8 slots
        await asyncio.sleep(0)
        assert len(decode.live) == 16
        decode.behaviour.step.set()
        assert await asyncio.gather(*asking) == [expected_ids(SHORT, 6)] * 20
        assert len(decode.seen.starts) == 20
        await check_nothing_is_left(router, decode)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InternalError("a bug"), 500), (InvalidFieldError("prompt", "no"), 400), (AuthenticationError("no"), 500)],
)
async def test_what_a_decode_rank_says_for_good_is_passed_on_once(
    router: RouterUnderTest, decode: FakeDecode, error: ServingError, status: int
) -> None:
    decode.behaviour.refuse_with = error
    assert (await failure_of(router, SHORT))[0] == status
    assert len(decode.seen.starts) == 1


async def test_a19_a_decode_leg_that_fails_ends_the_prefill_leg(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.hang = True
    decode.behaviour = Behaviour(refuse_with=InternalError("a bug"), step=asyncio.Event())
    asking = asyncio.create_task(failure_of(router, LONG))
    await until(lambda: prefill.running)
    assert decode.behaviour.step is not None
    decode.behaviour.step.set()
    assert (await asking)[0] == 500
    await until(lambda: prefill.cancelled, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


async def test_a_decode_rank_lost_while_prefill_runs_takes_the_prefill_along_to_the_next_attempt(
    model_dir: Path, prefill: FakePrefill
) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    prefill.behaviour.step = asyncio.Event()
    async with running_router(model_dir, [*ranks, prefill]) as router:
        asking = asyncio.create_task(answer_to(router, LONG))
        await until(lambda: prefill.running and any(rank.seen.starts for rank in ranks))
        victim = ranks[0] if ranks[0].seen.starts else ranks[1]
        await victim.server.kill()
        await until(lambda: len(prefill.seen.starts) == 2)
        prefill.behaviour.step.set()
        assert await asking == RIGHT
        assert [ticket.attempt for ticket in prefill.seen.tickets] == [1, 2]
        assert prefill.cancelled == 1


async def test_what_a_rank_says_after_the_end_is_not_heard(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.repeat_finish = True
    for _ in range(3):
        assert await answer_to(router, SHORT) == expected_ids(SHORT, 6)


async def test_a_draining_rank_gets_no_new_request(model_dir: Path) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    ranks[0].server.draining = True
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        for _ in range(6):
            await answer_to(router, SHORT)
    assert (len(ranks[0].seen.starts), len(ranks[1].seen.starts)) == (0, 6)


async def test_who_meets_a_draining_rank_waits_for_the_process_after_it_and_asks_the_old_one_once(
    model_dir: Path, decode: FakeDecode
) -> None:
    """The refusal comes before the registration that says the same, and costs no attempt of the few there are."""
    decode.behaviour.refuse_with = DrainingError("draining")
    async with running_router(model_dir, [decode], prefill_replicas=0, retry_max=0) as router:
        asking = asyncio.create_task(answer_to(router, SHORT))
        await until(lambda: decode.seen.starts)
        decode.behaviour.refuse_with = None
        await asyncio.sleep(0.3)
        assert len(decode.seen.starts) == 1
        await decode.server.restart()
        assert await asking == expected_ids(SHORT, 6)
        assert [work.attempt for work in decode.seen.starts] == [1, 2]


async def test_a_prefill_rank_that_drains_is_asked_once(model_dir: Path, decode: FakeDecode) -> None:
    leaving = FakePrefill(behaviour=Behaviour(refuse_with=DrainingError("draining")))
    async with running_router(model_dir, [decode, leaving]) as router:
        for index in range(3):
            prompt = [500 + index, *LONG]
            assert await answer_to(router, prompt) == expected_ids(prompt, 6)
    assert len(leaving.seen.tickets) == 1


async def test_d2_unrelated_requests_use_every_rank(model_dir: Path) -> None:
    ranks = [FakeDecode(f"decode-{index}", Behaviour(pause_s=0.002)) for index in range(4)]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        prompts = [[400 + index] for index in range(40)]
        answers = await asyncio.gather(*(answer_to(router, prompt) for prompt in prompts))
        assert answers == [expected_ids(prompt, 6) for prompt in prompts]
    assert min(len(rank.seen.starts) for rank in ranks) >= 6


async def test_more_than_may_wait_are_told_to_come_back(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.step = asyncio.Event()
    limits: dict[str, Any] = {"max_concurrent_requests": 1, "queue_size": 1}
    async with running_router(model_dir, [decode], prefill_replicas=0, **limits) as router:
        inside = asyncio.create_task(answer_to(router, SHORT))
        await until(lambda: decode.live)
        waiting = asyncio.create_task(answer_to(router, SHORT))
        await until(lambda: router.front.admission.waiting == 1)
        response = await router.http.post("/v1/completions", json={"prompt": SHORT})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        decode.behaviour.step.set()
        assert await inside == await waiting == expected_ids(SHORT, 6)


@pytest.mark.parametrize("only_prefill", [False, True])
async def test_without_decode_ranks_the_answer_is_503_and_soon(
    model_dir: Path, prefill: FakePrefill, only_prefill: bool
) -> None:
    async with running_router(model_dir, [prefill] if only_prefill else []) as router:
        async with asyncio.timeout(3.0):
            response = await router.http.post("/v1/completions", json={"prompt": SHORT})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert response.headers["retry-after"]
