"""Simulated clients: each asks one router for one thing, over gRPC or HTTP, and may hang up or be slow to read."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc

from tests.simulation.answers import Answer, End
from tests.simulation.calls import Dialler
from tests.simulation.http_calls import ask_over_http
from tests.simulation.network import Network, Node
from tests.simulation.plans import Ask
from tests.simulation.routers import router_address
from whalepod.cluster.wire import FIDELITIES, finish_reason_from_proto, sampling_to_proto
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc
from whalepod.services.router.tenancy import TENANT_HEADER


async def ask_router(ask: Ask, answer: Answer, network: Network) -> None:
    """Fill `answer`."""
    node, address = Node(f"client-{ask.name}"), router_address(ask.router)
    asking = ask_over_http if ask.over_http else _ask_over_grpc
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(ask.hangs_up_after_s):
                await asking(ask, answer, network, node, address)
    finally:
        answer.status = answer.status or grpc.StatusCode.CANCELLED
        answer.ended_s = network.loop.time()
        network.journal.note(ask.name, answer.status.name, *answer.said, answer.detail)


async def _ask_over_grpc(ask: Ask, answer: Answer, network: Network, node: Node, address: str) -> None:
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=ask.prompt),
        sampling=sampling_to_proto(ask.sampling),
        fidelity=FIDELITIES[ask.fidelity],
        cache_salt=ask.cache_salt,
    )
    kinds = {"timeout": ask.timeout_s, "metadata": ((TENANT_HEADER, ask.tenant),)}
    try:
        async with Dialler(network, node).channel(address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            if ask.streams:
                async for message in stub.GenerateStream(request, **kinds):
                    _note(answer, message)
                    await asyncio.sleep(ask.reads_every_s)
            else:
                _note(answer, await stub.Generate(request, **kinds))
            answer.status = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as failure:
        answer.status, answer.detail = failure.code(), failure.details() or ""


def _note(answer: Answer, message: router_pb2.GenerateStreamResponse | router_pb2.GenerateResponse) -> None:
    answer.say(0, message.token_ids)
    answer.logprobs += message.logprobs
    answer.scores += message.prompt_logprobs
    if message.HasField("usage"):
        reason, usage, route = finish_reason_from_proto(message.finish_reason), message.usage, message.route
        assert reason is not None
        answer.reasons[0] = reason
        answer.told = End(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, route.attempts, route.prefill_rank
        )
        answer.finish()
