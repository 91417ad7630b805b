"""A prefill rank: READY means stored, hits are what design §4 says, and nobody without a good ticket gets any work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest
import redis.asyncio as aioredis
from grpc_health.v1 import health_pb2

from tests.services.rank_world import (
    BLOCK_TOKENS,
    KEPT_ROWS,
    RunningRank,
    TestRouter,
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
from whalepod.core.ids import RequestId
from whalepod.kvstore.store_keys import handoff_snapshot_key
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc


@asynccontextmanager
async def prefill_rank(redis_port: int, **prefill: object) -> AsyncGenerator[tuple[RunningRank, TestRouter]]:
    config = world_config(redis_port, prefill={"chunk_tokens": 64, **prefill})
    async with running_rank(config, "prefill") as rank:
        yield rank, TestRouter(rank.info)


def ticket_for(router: TestRouter, prompt: tuple[int, ...], **fields: object) -> common_pb2.SignedTicket:
    return router.ticket(prompt, **{"prefill": "prefill-0", **fields})  # type: ignore[arg-type]


async def stored(redis_port: int, pattern: bytes) -> int:
    async with aioredis.Redis(port=redis_port) as client:
        return len([key async for key in client.scan_iter(match=pattern)])


async def is_running(rank: RunningRank, requests: int) -> bool:
    return await rank.running() == requests


async def test_ready_names_what_is_stored_and_the_first_token_is_the_models(redis_port: int) -> None:
    prompt = prompt_of(100)
    async with prefill_rank(redis_port) as (rank, router):
        ticket = ticket_for(router, prompt)
        ready = await run_prefill(rank.info.address, ticket)
        async with aioredis.Redis(port=redis_port) as client:
            assert await client.exists(handoff_snapshot_key(*key_of(ticket)))
    assert ready.stored
    assert ready.exact
    assert ready.snapshot_kind == prefill_pb2.SNAPSHOT_KIND_FULL
    assert ready.boundary_tokens == 100
    assert ready.cached_tokens == 0
    assert ready.blocks_stored == 100 // BLOCK_TOKENS == await stored(redis_port, b"b:*")
    expected = oracle_tokens(prompt, 1)[0]
    assert (ready.first_token.id, ready.first_token.logprob) == (expected.id, expected.logprob)
    assert ready.load.slots_total == 4


async def test_the_encoder_role_hands_over_below_the_kept_rows_without_a_token(redis_port: int) -> None:
    async with prefill_rank(redis_port, role="encoder") as (rank, router):
        ready = await run_prefill(rank.info.address, ticket_for(router, prompt_of(101)))
    assert ready.snapshot_kind == prefill_pb2.SNAPSHOT_KIND_ENCODER
    assert ready.boundary_tokens == (101 - KEPT_ROWS) // 2 * 2
    assert not ready.HasField("first_token")


async def test_the_same_prompt_again_is_a_hit_up_to_the_kept_rows(redis_port: int) -> None:
    prompt = prompt_of(150)
    async with prefill_rank(redis_port) as (rank, router):
        first = await run_prefill(rank.info.address, ticket_for(router, prompt))
        second = await run_prefill(rank.info.address, ticket_for(router, prompt))
    assert first.cached_tokens == 0
    assert second.cached_tokens == (150 - KEPT_ROWS) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.first_token == first.first_token


async def test_a_short_next_turn_restores_a_snapshot_and_a_shared_prefix_replays_its_halo(redis_port: int) -> None:
    prompt = prompt_of(200)
    async with prefill_rank(redis_port) as (rank, router):
        await run_prefill(rank.info.address, ticket_for(router, prompt))
        turn = await run_prefill(rank.info.address, ticket_for(router, prompt + prompt_of(5, seed=1)))
        shared = await run_prefill(rank.info.address, ticket_for(router, prompt[:112] + prompt_of(80, seed=2)))
    assert (turn.cached_tokens, turn.replayed_tokens) == ((205 - KEPT_ROWS) // BLOCK_TOKENS * BLOCK_TOKENS, 0)
    assert shared.cached_tokens == 112
    assert shared.replayed_tokens > 0


async def test_another_salt_shares_nothing(redis_port: int) -> None:
    prompt = prompt_of(150)
    async with prefill_rank(redis_port) as (rank, router):
        await run_prefill(rank.info.address, ticket_for(router, prompt, salt=b"a"))
        other = await run_prefill(rank.info.address, ticket_for(router, prompt, salt=b"b"))
    assert other.cached_tokens == 0


async def test_tickets_that_are_not_good_are_refused_by_their_fault_and_nothing_is_stored(redis_port: int) -> None:
    prompt = prompt_of(40)
    async with prefill_rank(redis_port) as (rank, router):
        cases = [
            (ticket_for(TestRouter(rank.info, secret="another secret of 16"), prompt), grpc.StatusCode.UNAUTHENTICATED),
            (ticket_for(router, prompt, valid_s=-60.0), grpc.StatusCode.UNAUTHENTICATED),
            (ticket_for(router, prompt, prefill="prefill-1"), grpc.StatusCode.UNAUTHENTICATED),
            (ticket_for(router, prompt, prefill="other", decode="prefill-0"), grpc.StatusCode.UNAUTHENTICATED),
            (common_pb2.SignedTicket(ticket=b"\xff\xff", mac=b"x"), grpc.StatusCode.UNAUTHENTICATED),
            (ticket_for(router, prompt, model="orca"), grpc.StatusCode.NOT_FOUND),
            (ticket_for(router, prompt, timeout_s=-1.0), grpc.StatusCode.DEADLINE_EXCEEDED),
            (ticket_for(router, prompt, request_id=RequestId(b"short")), grpc.StatusCode.INVALID_ARGUMENT),
            (ticket_for(router, prompt_of(100_000)), grpc.StatusCode.INVALID_ARGUMENT),
        ]
        for ticket, status in cases:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await run_prefill(rank.info.address, ticket)
            assert refusal.value.code() is status, refusal.value.details()
    assert await stored(redis_port, b"[bh]:*") == 0


async def test_an_older_attempt_is_refused_after_a_newer_one(redis_port: int) -> None:
    prompt = prompt_of(20)
    name = RequestId(b"one request, two")
    async with prefill_rank(redis_port) as (rank, router):
        await run_prefill(rank.info.address, ticket_for(router, prompt, request_id=name, attempt=2))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await run_prefill(rank.info.address, ticket_for(router, prompt, request_id=name, attempt=1))
    assert refusal.value.code() is grpc.StatusCode.ABORTED


async def test_cancelling_the_call_stops_the_work_and_frees_its_blocks(redis_port: int) -> None:
    async with (
        prefill_rank(redis_port, chunk_tokens=16) as (rank, router),
        grpc.aio.insecure_channel(rank.info.address) as channel,
    ):
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        calls = [
            stub.Run(prefill_pb2.RunRequest(ticket=ticket_for(router, prompt_of(400, seed=seed), salt=bytes([seed]))))
            for seed in range(4)
        ]
        await until(lambda: is_running(rank, 4))
        for call in calls:
            call.cancel()
        await until(lambda: is_running(rank, 0))
        assert await gauge(rank.config, "prefill", "whalepod_rank_kv_blocks_used") == 0
    assert await stored(redis_port, b"h:*") <= 1


async def test_a_draining_rank_finishes_its_work_refuses_more_and_says_so(redis_port: int) -> None:
    prober = HealthProber()
    async with prefill_rank(redis_port, chunk_tokens=16) as (rank, router):
        assert await prober.probe(rank.info.address) is Liveness.SERVING
        running = asyncio.ensure_future(run_prefill(rank.info.address, ticket_for(router, prompt_of(400))))
        await until(lambda: is_running(rank, 1))
        rank.stop.set()

        async def draining() -> bool:
            return await prober.probe(rank.info.address) is not Liveness.SERVING

        await until(draining)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await run_prefill(rank.info.address, ticket_for(router, prompt_of(20)))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await running).stored
        await rank.task
    await prober.close()


async def test_the_server_answers_health_checks_by_service_and_reflection(redis_port: int) -> None:
    async with prefill_rank(redis_port) as (rank, _), grpc.aio.insecure_channel(rank.info.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply = await check(health_pb2.HealthCheckRequest(service="whalepod.rpc.prefill.v1.PrefillService"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("direct", [False, True])
async def test_without_redis_only_a_rank_that_serves_directly_says_that_its_state_can_be_had(
    redis_port: int, direct: bool
) -> None:
    nowhere = redis_port + 1 if redis_port < 65000 else redis_port - 1
    async with running_rank(world_config(nowhere, kv={"direct": direct}), "prefill") as rank:
        ready = await run_prefill(rank.info.address, ticket_for(TestRouter(rank.info), prompt_of(60)))
    assert ready.stored == direct
    assert bool(ready.direct_address) == direct
