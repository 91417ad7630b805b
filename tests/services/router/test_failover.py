"""Streams that go on from another decode rank when theirs is lost: the client sees a pause, and nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import (
    RouterUnderTest,
    check_nothing_is_left,
    failure_of,
    running_router,
    stream_of,
    until,
)
from whalepod.core.errors import CapacityError, DrainingError, UnavailableError
from whalepod.services.router import router_parts
from whalepod.services.router.placer import Patience
from whalepod.services.router.router_metrics import FAILOVER_SECONDS, FAILOVERS

LONG = [400 + index % 90 for index in range(100)]
SHORT = LONG[:5]
ROUTES = pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])


def unlike(prompt: list[int], index: int) -> list[int]:
    """A prompt of the same length that shares no prefix: nothing draws it to a rank."""
    return [300 + index, *prompt[1:]]


async def streamed(router: RouterUnderTest, **body: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """Token ids of a stream that ended well, and its chunks."""
    async with stream_of(router, return_token_ids=True, **body) as events:
        got = [event async for event in events]
    assert got[-1] == "[DONE]", got[-1]
    chunks = [json.loads(event) for event in got[:-1]]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]], chunks


@ROUTES
@pytest.mark.parametrize("burst", [1, 3])
async def test_e10_a_stream_goes_on_from_another_rank_without_a_token_lost_or_repeated(
    model_dir: Path, prefill: FakePrefill, prompt: list[int], burst: int
) -> None:
    ranks = [FakeDecode(f"decode-{index}", Behaviour(burst=burst)) for index in range(3)]
    before = FAILOVERS._value.get()
    async with running_router(model_dir, [*ranks, prefill], remote_prefill_tokens_min=32) as router:
        ranks[0].behaviour.gone_after_tokens = ranks[1].behaviour.gone_after_tokens = 3
        for another in (unlike(prompt, index) for index in range(12)):
            ids, _ = await streamed(router, prompt=another, max_tokens=12, seed=5)
            assert ids == expected_ids(another, 12, seed=5)
        assert FAILOVERS._value.get() == before + 2
        await check_nothing_is_left(router, *ranks, prefill)


async def test_a_resumed_attempt_carries_on_with_a_higher_number_and_what_was_sent(model_dir: Path) -> None:
    mortal, other = FakeDecode("decode-0", Behaviour(gone_after_tokens=4)), FakeDecode("decode-1")
    async with running_router(model_dir, [mortal, other], prefill_replicas=0) as router:
        while not mortal.seen.starts:
            await streamed(router, prompt=SHORT, max_tokens=9)
        first, second = mortal.seen.starts[-1], other.seen.starts[-1]
        assert (first.request_id, first.attempt, list(first.resumed_ids)) == (second.request_id, 1, [])
        assert (second.attempt, list(second.resumed_ids)) == (2, expected_ids(SHORT, 4))
        assert FAILOVER_SECONDS._sum.get() < 60


@ROUTES
async def test_usage_of_a_stream_that_moved_is_that_of_one_that_did_not(
    model_dir: Path, prefill: FakePrefill, prompt: list[int]
) -> None:
    mortal = FakeDecode("decode-0", Behaviour(gone_after_tokens=3, cached_tokens=4))
    other = FakeDecode("decode-1", Behaviour(cached_tokens=5))
    prefill.behaviour.cached_tokens = 4
    async with running_router(model_dir, [mortal, other, prefill], remote_prefill_tokens_min=32) as router:
        chunks: list[dict[str, Any]] = []
        count = 0
        while not mortal.seen.starts:
            count += 1
            prompt = unlike(prompt, count)
            _, chunks = await streamed(
                router, prompt=prompt, max_tokens=9, logprobs=1, stream_options={"include_usage": True}
            )
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 9)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        logprobs = [value for part in parts for value in part["token_logprobs"]]
        assert logprobs == [-(len(prompt) + index) / 64 for index in range(9)]


async def test_a_stop_string_that_straddles_the_loss_is_found(model_dir: Path) -> None:
    mortal, other = FakeDecode("decode-0"), FakeDecode("decode-1")
    async with running_router(model_dir, [mortal, other], prefill_replicas=0) as router:
        whole = (await router.complete(prompt=SHORT, max_tokens=12))["choices"][0]["text"]
        parts = [(await router.complete(prompt=SHORT, max_tokens=count))["choices"][0]["text"] for count in (3, 4, 5)]
        stop = whole[len(parts[0]) + 1 : len(parts[2])]  # from the fourth token into the fifth
        assert len(stop) > 1
        expected = await router.complete(prompt=SHORT, max_tokens=12, stop=stop)
        mortal.behaviour.gone_after_tokens = 4
        mortal.seen.starts.clear()
        got: dict[str, Any] = {}
        while not mortal.seen.starts:
            got = await router.complete(prompt=SHORT, max_tokens=12, stop=stop)
        assert got["choices"][0]["text"] == expected["choices"][0]["text"]
        assert got["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("error", [CapacityError("full"), UnavailableError("draining")])
async def test_a_stream_moves_on_past_a_rank_that_refuses(model_dir: Path, error: Exception) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(3)]
    ranks[0].behaviour.gone_after_tokens = 3
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        while not ranks[0].seen.starts:
            ranks[1].behaviour.refuse_with = error  # type: ignore[assignment]
            ids, _ = await streamed(router, prompt=SHORT, max_tokens=9)
            assert ids == expected_ids(SHORT, 9)


async def test_the_only_decode_rank_may_restart_in_mid_stream(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour = Behaviour(gone_after_tokens=3)
    async with running_router(model_dir, [decode], prefill_replicas=0) as router:
        asking = asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9))
        await until(lambda: not decode.server.alive)
        decode.behaviour = Behaviour()
        await decode.server.restart()
        ids, _ = await asking
        assert ids == expected_ids(SHORT, 9)


async def test_who_is_given_back_by_every_rank_waits_for_their_successors_longer_than_after_a_loss(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a pool are told to stop at once: no attempt of the few there are is spent on that."""
    monkeypatch.setattr(router_parts, "Patience", lambda **_: Patience(lost_s=0.0))
    stopping = DrainingError("this rank is stopping")
    ranks = [FakeDecode(f"decode-{index}", Behaviour(fail_after_tokens=(2, stopping))) for index in range(2)]
    async with running_router(model_dir, ranks, prefill_replicas=0, retry_max=0) as router:
        asking = asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9))
        await until(lambda: not router.front.table.decode_ranks())
        assert all(rank.seen.starts for rank in ranks)
        for rank in ranks:
            await rank.server.kill()
            rank.behaviour = Behaviour()
        await ranks[0].server.restart()
        ids, _ = await asking
        assert ids == expected_ids(SHORT, 9)


async def test_who_is_lost_by_a_rank_that_drains_waits_for_its_successor_too(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are told to stop; one is killed before it has given back what it has, the other takes nothing more."""
    monkeypatch.setattr(router_parts, "Patience", lambda **_: Patience(lost_s=0.0))
    ranks = [FakeDecode(f"decode-{index}", Behaviour(step=asyncio.Event())) for index in range(2)]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        asking = asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9))
        await until(lambda: any(rank.live for rank in ranks))
        killed = next(rank for rank in ranks if rank.live)
        for rank in ranks:
            rank.server.draining = True
        router.directory.on_change()
        killed.behaviour = Behaviour()
        await killed.server.kill()
        await until(lambda: killed.server.rank_id not in router.directory.ranks)
        killed.server.draining = False
        await killed.server.restart()
        ids, _ = await asking
        assert ids == expected_ids(SHORT, 9)


async def test_who_comes_while_every_rank_drains_waits_for_a_successor(
    model_dir: Path, decode: FakeDecode, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As who came just before does."""
    monkeypatch.setattr(router_parts, "Patience", lambda **_: Patience(first_s=0.0))
    async with running_router(model_dir, [decode, prefill]) as router:
        decode.server.draining = True
        router.directory.on_change()
        asking = [asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9))]
        await until(lambda: router.front.admission.running == 1)
        await decode.server.kill()
        router.directory.report_lost(decode.server.rank_id, decode.server.info().incarnation)
        asking.append(asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9)))
        await until(lambda: router.front.admission.running == 2)
        decode.server.draining = False
        await decode.server.restart()
        assert [ids for ids, _ in await asyncio.gather(*asking)] == 2 * [expected_ids(SHORT, 9)]


async def test_a_rank_that_loses_a_request_again_and_again_is_given_up_when_nothing_comes(model_dir: Path) -> None:
    ranks = [FakeDecode("decode-0", Behaviour(die_after_tokens=0)), FakeDecode("decode-1")]
    ranks[1].behaviour.gone_after_tokens = 2
    async with running_router(model_dir, ranks, prefill_replicas=0, queue_timeout_seconds=0.5, retry_max=2) as router:
        assert await failure_of(router, SHORT) == (502, "worker_lost")


async def test_a_rank_that_is_stopped_loses_its_streams_when_the_directory_drops_it(model_dir: Path) -> None:
    """A process that no longer runs keeps its connections: nothing breaks by itself."""
    ranks = [FakeDecode(f"decode-{index}", Behaviour(step=asyncio.Event())) for index in range(2)]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        asking = asyncio.create_task(streamed(router, prompt=SHORT, max_tokens=9))
        await until(lambda: any(rank.live for rank in ranks))
        stopped, other = sorted(ranks, key=lambda rank: not rank.live)
        assert other.behaviour.step is not None
        other.behaviour.step.set()
        router.directory.remove(stopped)
        assert (await asking)[0] == expected_ids(SHORT, 9)
        await until(lambda: not stopped.live, timeout_s=1.0)
