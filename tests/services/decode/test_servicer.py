"""A decode rank: the model's tokens whatever was handed over, one owner for each request, and nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import redis.asyncio as aioredis

from tests.services.rank_world import (
    GREEDY,
    SEEDED,
    DecodeStream,
    RunningRank,
    TestRouter,
    decode_stream,
    gauge,
    key_of,
    oracle_tokens,
    prompt_of,
    run_prefill,
    running_rank,
    until,
    world_config,
)
from whalepod.cluster.liveness import HealthProber, Liveness
from whalepod.core.errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineError,
    DrainingError,
    StaleAttemptError,
)
from whalepod.core.ids import RequestId
from whalepod.engine.interface import FinishReason, TokensEvent
from whalepod.kvstore.store_keys import handoff_snapshot_key
from whalepod.rpc.common.v1 import common_pb2

LONG = replace(GREEDY, max_tokens=24)


@asynccontextmanager
async def decode_rank(
    redis_port: int, **decode: object
) -> AsyncGenerator[tuple[RunningRank, TestRouter, DecodeStream]]:
    async with running_rank(world_config(redis_port, decode=decode), "decode") as rank:
        async with decode_stream(rank.info.address) as stream:
            yield rank, TestRouter(rank.info), stream


async def idle(rank: RunningRank) -> bool:
    names = ("running", "waiting", "kv_blocks_used")
    return [await gauge(rank.config, "decode", f"whalepod_rank_{name}") for name in names] == [0, 0, 0]


async def test_a_prompt_without_a_prefill_rank_is_computed_here(redis_port: int) -> None:
    prompt = prompt_of(70)
    async with decode_rank(redis_port) as (_, router, stream):
        heard = await stream.end_of(stream.start(router.ticket(prompt)))
    assert heard.tokens == list(oracle_tokens(prompt, 6))
    assert heard.end is not None
    assert (heard.end.reason, heard.end.cached_tokens) == (FinishReason.LENGTH, 0)


@pytest.mark.parametrize("role", ["full", "encoder"])
@pytest.mark.parametrize("seeded", [False, True])
async def test_a_handed_off_prompt_goes_on_with_the_models_tokens(redis_port: int, role: str, seeded: bool) -> None:
    prompt = prompt_of(101)
    sampling = SEEDED if seeded else replace(GREEDY, max_tokens=9)
    config = world_config(redis_port, prefill={"role": role})
    async with running_rank(config, "prefill") as prefill, running_rank(config, "decode") as decode:
        router = TestRouter(decode.info)
        ticket = router.ticket(prompt, sampling, prefill="prefill-0")
        async with decode_stream(decode.info.address) as stream:
            key = stream.start(ticket)
            stream.ready(key, await run_prefill(prefill.info.address, ticket))
            heard = await stream.end_of(key)
        async with aioredis.Redis(port=redis_port) as client:
            assert not await client.exists(handoff_snapshot_key(*key))
    assert heard.tokens == list(oracle_tokens(prompt, 9, seeded=seeded))


async def test_f15_a_snapshot_that_is_gone_costs_time_and_no_token(redis_port: int) -> None:
    prompt = prompt_of(90)
    config = world_config(redis_port)
    async with running_rank(config, "prefill") as prefill, running_rank(config, "decode") as decode:
        ticket = TestRouter(decode.info).ticket(prompt, prefill="prefill-0")
        ready = await run_prefill(prefill.info.address, ticket)
        async with aioredis.Redis(port=redis_port) as client:
            assert await client.delete(handoff_snapshot_key(*key_of(ticket)))
        async with decode_stream(decode.info.address) as stream:
            key = stream.start(ticket)
            stream.ready(key, ready)
            heard = await stream.end_of(key)
    assert heard.tokens == list(oracle_tokens(prompt, 6))


async def test_f4_without_redis_a_hand_off_is_read_from_the_prefill_ranks_memory(redis_port: int) -> None:
    prompt = prompt_of(90)
    config = world_config(redis_port + 1 if redis_port < 65000 else redis_port - 1)
    async with running_rank(config, "prefill") as prefill, running_rank(config, "decode") as decode:
        before = await gauge(config, "decode", 'whalepod_kv_tokens_total{source="direct"}')
        ticket = TestRouter(decode.info).ticket(prompt, prefill="prefill-0")
        async with decode_stream(decode.info.address) as stream:
            key = stream.start(ticket)
            stream.ready(key, await run_prefill(prefill.info.address, ticket))
            heard = await stream.end_of(key)
        after = await gauge(config, "decode", 'whalepod_kv_tokens_total{source="direct"}')
    assert heard.tokens == list(oracle_tokens(prompt, 6))
    assert after - before == 80


async def test_a_prefill_that_failed_is_made_up_for(redis_port: int) -> None:
    prompt = prompt_of(50)
    async with decode_rank(redis_port) as (_, router, stream):
        key = stream.start(router.ticket(prompt, prefill="prefill-0"))
        stream.ready(key, None)
        heard = await stream.end_of(key)
    assert heard.tokens == list(oracle_tokens(prompt, 6))


async def test_requests_of_one_router_share_a_message_for_each_step(redis_port: int) -> None:
    async with decode_rank(redis_port) as (_, router, stream):
        keys = [stream.start(router.ticket(prompt_of(20, seed=seed), LONG)) for seed in range(3)]
        for key in keys:
            await stream.end_of(key)
    together = [message for message in stream.messages if len(message.events) == 3]
    assert len(together) > 12
    for message in stream.messages:
        keys_of_tokens = [event.request_id for event in message.events if isinstance(event, TokensEvent)]
        assert len(set(keys_of_tokens)) == len(keys_of_tokens)


async def test_a_cancelled_request_says_nothing_more_and_frees_everything(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        key = stream.start(router.ticket(prompt_of(40), LONG))
        other = stream.start(router.ticket(prompt_of(20, seed=1), LONG))
        await stream.until(lambda: len(stream.heard[key].tokens) > 3)
        stream.cancel(key)
        stream.cancel(key)
        stream.cancel((RequestId(b"an unknown one.."), 1))
        assert len((await stream.end_of(other)).tokens) == 24
        assert len(stream.heard[key].tokens) < 24
        assert stream.heard[key].end is None
        await until(lambda: idle(rank))


async def test_a_broken_stream_takes_its_own_requests_with_it_and_no_others(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        kept = stream.start(router.ticket(prompt_of(20), LONG))
        async with decode_stream(rank.info.address) as other:
            lost = other.start(router.ticket(prompt_of(20, seed=1), LONG))
            waiting = other.start(router.ticket(prompt_of(20, seed=2), prefill="prefill-0"))
            await other.until(lambda: len(other.heard[lost].tokens) > 3)
            assert other.heard[waiting].tokens == []
        assert len((await stream.end_of(kept)).tokens) == 24
        await until(lambda: idle(rank))


async def test_nobody_cancels_or_completes_anothers_request(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        key = stream.start(router.ticket(prompt_of(20), LONG))
        await stream.until(lambda: len(stream.heard[key].tokens) > 0)
        async with decode_stream(rank.info.address) as other:
            other.cancel(key)
            other.ready(key, None)
            done = other.start(router.ticket(prompt_of(5), replace(GREEDY, max_tokens=1)))
            await other.end_of(done)
        assert len((await stream.end_of(key)).tokens) == 24


async def test_naming_anothers_request_does_not_take_it_away(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        ticket = router.ticket(prompt_of(20), LONG)
        key = stream.start(ticket)
        await stream.until(lambda: len(stream.heard[key].tokens) > 0)
        unsigned = common_pb2.SignedTicket(ticket=ticket.ticket, mac=bytes(32))
        for stolen, reason in ((unsigned, AuthenticationError), (ticket, StaleAttemptError)):
            async with decode_stream(rank.info.address) as other:
                other.start(stolen)
                end = (await other.end_of(key)).end
                assert end is not None
                assert isinstance(end.error, reason)
        assert len((await stream.end_of(key)).tokens) == 24


async def test_refusals_end_their_request_alone_with_their_reason(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        good = stream.start(router.ticket(prompt_of(20), LONG))
        refused = {
            stream.start(
                TestRouter(rank.info, secret="another secret of 16").ticket(prompt_of(5))
            ): AuthenticationError,
            stream.start(router.ticket(prompt_of(5), decode="decode-1", prefill="decode-0")): AuthenticationError,
            stream.start(router.ticket(prompt_of(5), valid_s=-60.0)): AuthenticationError,
            stream.start(router.ticket(prompt_of(5), timeout_s=-1.0)): DeadlineError,
            stream.start(router.ticket(prompt_of(100_000))): ContextLengthError,
        }
        for key, error_class in refused.items():
            heard = await stream.end_of(key)
            assert heard.end is not None
            assert type(heard.end.error) is error_class
        assert len((await stream.end_of(good)).tokens) == 24


async def test_a_newer_attempt_takes_over_and_the_older_one_never_comes_back(redis_port: int) -> None:
    prompt = prompt_of(30)
    name = RequestId(b"one request, two")
    async with decode_rank(redis_port) as (rank, router, stream):
        first = stream.start(router.ticket(prompt, LONG, request_id=name, attempt=1))
        await stream.until(lambda: len(stream.heard[first].tokens) > 0)
        async with decode_stream(rank.info.address) as other:
            second = other.start(router.ticket(prompt, request_id=name, attempt=2))
            ended = await stream.end_of(first)
            assert ended.end is not None
            assert isinstance(ended.end.error, StaleAttemptError)
            assert (await other.end_of(second)).tokens == list(oracle_tokens(prompt, 6))
            late = other.start(router.ticket(prompt, request_id=name, attempt=1))
            refused = await other.end_of(late)
            assert refused.end is not None
            assert isinstance(refused.end.error, StaleAttemptError)


async def test_a_repeated_start_is_harmless(redis_port: int) -> None:
    prompt = prompt_of(30)
    async with decode_rank(redis_port) as (_, router, stream):
        ticket = router.ticket(prompt)
        key = stream.start(ticket)
        stream.start(ticket)
        assert (await stream.end_of(key)).tokens == list(oracle_tokens(prompt, 6))


async def test_a_router_that_has_no_more_to_say_still_hears_the_end(redis_port: int) -> None:
    async with decode_rank(redis_port) as (_, router, stream):
        key = stream.start(router.ticket(prompt_of(20)))
        stream.close()
        await stream.end_of(key)
        await stream.listening


async def test_a_ticket_that_cannot_be_parsed_ends_the_stream_with_a_status(
    redis_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with decode_rank(redis_port) as (_, router, stream):
        mac = router.ticket(prompt_of(5)).mac
        stream.send_start(common_pb2.SignedTicket(ticket=b"\xff\xff", mac=mac))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.listening
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "could not be handled" not in caplog.text, "a stranger fills no log with errors of ours"


async def test_a_draining_rank_finishes_its_streams_and_refuses_newcomers(redis_port: int) -> None:
    prober = HealthProber()
    async with decode_rank(redis_port) as (rank, router, stream):
        key = stream.start(router.ticket(prompt_of(20), LONG))
        await stream.until(lambda: len(stream.heard[key].tokens) > 0)
        rank.stop.set()

        async def leaving() -> bool:
            return await prober.probe(rank.info.address) is not Liveness.SERVING

        await until(leaving)
        refused = await stream.end_of(stream.start(router.ticket(prompt_of(5))))
        assert refused.end is not None
        assert type(refused.end.error) is DrainingError
        assert len((await stream.end_of(key)).tokens) == 24
        await rank.task
    await prober.close()


async def test_what_drains_too_long_is_given_back_and_does_not_look_finished(redis_port: int) -> None:
    config = world_config(redis_port, router={"drain_seconds": 0.2})
    async with running_rank(config, "decode") as rank, decode_stream(rank.info.address) as stream:
        key = stream.start(TestRouter(rank.info).ticket(prompt_of(20), replace(GREEDY, max_tokens=3000)))
        await stream.until(lambda: len(stream.heard[key].tokens) > 0)
        rank.stop.set()
        ended = await stream.end_of(key)
        assert ended.end is not None
        assert (ended.end.reason, type(ended.end.error)) == (FinishReason.ERROR, DrainingError)
        await rank.task


async def test_a_rank_serves_without_redis(redis_port: int) -> None:
    prompt = prompt_of(70)
    async with decode_rank(redis_port - 1) as (_, router, stream):
        heard = await stream.end_of(stream.start(router.ticket(prompt)))
    assert heard.tokens == list(oracle_tokens(prompt, 6))


async def test_what_a_rank_does_is_on_its_metrics_page(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        names = {
            "tokens": "whalepod_rank_generated_tokens_total",
            "finished": 'whalepod_rank_finished_total{reason="length"}',
            "decode steps": 'whalepod_rank_step_seconds_count{phase="decode"}',
            "prompt rows": 'whalepod_rank_batch_rows_sum{phase="prefill"}',
        }
        before = {what: await gauge(rank.config, "decode", name) for what, name in names.items()}
        await stream.end_of(stream.start(router.ticket(prompt_of(70))))
        after = {what: await gauge(rank.config, "decode", name) for what, name in names.items()}
    assert {what: after[what] - before[what] for what in names} == {
        "tokens": 6,
        "finished": 1,
        "decode steps": 5,
        "prompt rows": 70,
    }
