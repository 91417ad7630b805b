"""The client and the gRPC front, end to end over fake ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids, says
from tests.services.router.router_under_test import RouterUnderTest, running_router, until
from whalepod.client import AsyncClient, Client
from whalepod.core.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc
from whalepod.services.router import grpc_front

TOKENIZER = shipped_tokenizer()
LONG = [400 + index % 90 for index in range(100)]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}, "max_tokens": 5
}  # fmt: skip


@pytest.fixture
async def client(router: RouterUnderTest) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(router.grpc_address, timeout_s=10.0) as client:
        yield client


async def test_ids_in_ids_out_with_the_route_they_took(client: AsyncClient) -> None:
    answer = await client.generate(LONG, sampling=SamplingParams(temperature=0, max_tokens=4, logprobs=0))
    assert list(answer.token_ids) == expected_ids(LONG, 4)
    assert list(answer.logprobs) == [-(len(LONG) + index) / 64 for index in range(4)]
    assert (answer.prompt_tokens, answer.completion_tokens) == (100, 4)
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.prefill_rank, answer.decode_rank, answer.attempts) == ("prefill-0", "decode-0", 1)
    local = await client.generate(LONG[:5], max_tokens=4)
    assert (local.prefill_rank, local.decode_rank) == ("", "decode-0")


@pytest.mark.parametrize("burst", [1, 3])
async def test_a_stream_says_what_the_whole_answer_says(client: AsyncClient, decode: FakeDecode, burst: int) -> None:
    decode.behaviour.burst = burst
    sampling = SamplingParams(max_tokens=7, seed=3, logprobs=1)
    whole = await client.generate("Hello", sampling=sampling, stop=("zz",))
    deltas = [delta async for delta in client.stream("Hello", sampling=sampling, stop=("zz",))]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert tuple(value for delta in deltas for value in delta.logprobs) == whole.logprobs
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].completion_tokens) == (whole.finish_reason, 7)


async def test_without_max_tokens_the_rest_of_the_context_is_used(client: AsyncClient, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("short"))
    await client.generate(LONG[:5])
    assert decode.seen.starts[0].sampling.max_tokens == 4096 - 5


async def test_a_stop_string_ends_the_text_and_the_work(client: AsyncClient, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("one two three"))
    answer = await client.generate("count", stop=("two",), max_tokens=100)
    assert (answer.text, answer.finish_reason) == ("one ", FinishReason.STOP)
    assert decode.live == {}


async def test_salt_and_fidelity_reach_the_rank(client: AsyncClient, decode: FakeDecode) -> None:
    for salt in ("", "x"):
        await client.generate(LONG[:20], max_tokens=1, cache_salt=salt, fidelity=Fidelity.EXACT)
    one, two = decode.seen.starts
    assert one.fidelity is two.fidelity is Fidelity.EXACT
    assert list(one.block_hashes) != list(two.block_hashes)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "field"),
    [
        ("", {}, InvalidFieldError, "prompt"),
        ([], {}, InvalidFieldError, "prompt"),
        ([10**6], {}, InvalidFieldError, "prompt"),
        ([400] * 4096, {}, ContextLengthError, "prompt"),
        ("a", {"max_tokens": 4096}, ContextLengthError, "prompt"),
        ("a", {"stop": ("",)}, InvalidFieldError, "stop"),
        ("a", {"stop": ("x",) * 17}, InvalidFieldError, "stop"),
        ("a", {"sampling": SamplingParams(stop_token_ids=(10**6,))}, InvalidFieldError, "stop_token_ids"),
        ("a", {"cache_salt": "s" * 2000}, InvalidFieldError, "cache_salt"),
        ("a", {"model": "gpt"}, ModelNotFoundError, None),
    ],
)
async def test_bad_requests_raise_the_error_that_names_the_field(
    client: AsyncClient, decode: FakeDecode, prompt: Any, options: dict[str, Any], error: type[ServingError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await client.generate(prompt, **options)
    assert type(caught.value) is error
    assert getattr(caught.value, "field", None) == field
    assert decode.seen.starts == []
    assert (await client.generate("next", max_tokens=1)).completion_tokens == 1


async def test_a_rank_lost_in_mid_stream_raises_after_what_had_come(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.gone_after_tokens = 2
    got: list[int] = []

    async def read(address: str) -> None:
        async with AsyncClient(address, timeout_s=10.0) as client:
            async for delta in client.stream(LONG[:5], max_tokens=9):
                got.extend(delta.token_ids)

    async with running_router(model_dir, [decode], prefill_replicas=0, queue_timeout_seconds=0.3) as router:
        with pytest.raises(WorkerLostError):
            await read(router.grpc_address)
    assert got == expected_ids(LONG[:5], 2)


async def test_leaving_a_stream_stops_the_request(client: AsyncClient, decode: FakeDecode) -> None:
    decode.behaviour = Behaviour(pause_s=0.01)
    stream = client.stream(LONG[:5], max_tokens=4000)
    await anext(aiter(stream))
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]  # an async generator, as its caller may know
    await until(lambda: not decode.live, timeout_s=1.0)


async def test_a_calls_own_deadline_stops_the_request(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.hang = True
    async with AsyncClient(router.grpc_address, timeout_s=0.5) as client:
        with pytest.raises(DeadlineError):
            await client.generate("Hello")
    await until(lambda: not decode.live, timeout_s=1.0)


async def test_without_ranks_a_call_is_unavailable(model_dir: Path) -> None:
    async with running_router(model_dir, []) as router, AsyncClient(router.grpc_address) as client:
        with pytest.raises(UnavailableError):
            await client.generate("Hello")


async def test_a_conversation_is_the_same_as_over_http(client: AsyncClient, router: RouterUnderTest) -> None:
    over_http = (await router.http.post("/v1/chat/completions", json=CHAT)).json()
    answer = await client.chat(CHAT)
    assert {**answer, "id": "", "created": 0} == {**over_http, "id": "", "created": 0}
    chunks = [chunk async for chunk in client.chat_stream(CHAT)]
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert content == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize(
    "body", [{"messages": []}, {**CHAT, "top_k": -5}, {**CHAT, "response_format": {"type": "json_object"}}]
)
async def test_a_bad_conversation_raises(client: AsyncClient, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        await client.chat(body)
    with pytest.raises(RequestError):
        await anext(aiter(client.chat_stream(body)))


async def test_the_synchronous_client_does_the_same(router: RouterUnderTest) -> None:
    def talk() -> None:
        with Client(router.grpc_address, timeout_s=10.0) as client:
            answer = client.generate(LONG, max_tokens=4)
            assert list(answer.token_ids) == expected_ids(LONG, 4)
            assert "".join(delta.text for delta in client.stream(LONG, max_tokens=4)) == answer.text
            assert client.chat(CHAT)["usage"]["completion_tokens"] == 5
            assert list(client.chat_stream(CHAT))[-1]["usage"]["completion_tokens"] == 5
            with pytest.raises(InvalidFieldError):
                client.generate("")
            with pytest.raises(InvalidFieldError):
                list(client.stream(""))

    await asyncio.to_thread(talk)


async def test_the_request_id_is_echoed_and_tenants_are_parted(model_dir: Path, decode: FakeDecode) -> None:
    async with running_router(model_dir, [decode], prefill_replicas=0, trust_tenant_header=True) as router:
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            call = channel.unary_unary("/whalepod.rpc.router.v1.RouterService/Chat")
            for tenant in ("a", "b"):
                sent = call(_chat_bytes(), metadata=(("x-request-id", "mine"), ("x-tenant-id", tenant)))
                await sent
                assert dict(await sent.initial_metadata())["x-request-id"] == "mine"
            with pytest.raises(grpc.aio.AioRpcError, match="x-tenant-id is given twice"):
                await call(_chat_bytes(), metadata=(("x-tenant-id", "a"), ("x_tenant_id", "b")))
    one, two = decode.seen.tickets
    assert (one.tenant, two.tenant) == ("a", "b")
    assert one.salt != two.salt


async def test_health_and_reflection_answer(router: RouterUnderTest) -> None:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "whalepod.rpc.router.v1.RouterService"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        reflection: Any = stub(channel)
        listing = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for reply in listing:
            names = {service.name for service in reply.list_services_response.service}
            assert "whalepod.rpc.router.v1.RouterService" in names


async def test_a_prompt_of_a_million_tokens_fits_through_the_wire(client: AsyncClient) -> None:
    with pytest.raises(ContextLengthError):
        await client.generate([400] * 1_048_576)


async def test_a_hand_off_that_fails_is_computed_by_the_decode_rank(client: AsyncClient, prefill: FakePrefill) -> None:
    prefill.behaviour.refuse_with = UnavailableError("not now")
    answer = await client.generate(LONG, max_tokens=4)
    assert list(answer.token_ids) == expected_ids(LONG, 4)
    assert answer.prefill_rank == ""


def _chat_bytes() -> bytes:
    import json

    from whalepod.rpc.router.v1 import router_pb2

    return router_pb2.ChatRequest(body_json=json.dumps(CHAT)).SerializeToString()


async def test_a_grammar_is_checked_before_any_rank_is_touched(client: AsyncClient, decode: FakeDecode) -> None:
    params = SamplingParams(max_tokens=2, grammar=GrammarSpec(GrammarKind.REGEX, "[ab]+"))
    await client.generate("Hello", sampling=params)
    assert decode.seen.starts[-1].sampling.grammar == params.grammar
    starts = len(decode.seen.starts)
    with pytest.raises(InvalidFieldError, match=r"grammar: .*unclosed group") as caught:
        await client.generate("Hello", sampling=replace(params, grammar=GrammarSpec(GrammarKind.REGEX, "(a")))
    assert caught.value.field == "grammar"
    assert len(decode.seen.starts) == starts


async def test_a_user_shares_prefixes_with_itself_alone(client: AsyncClient, decode: FakeDecode) -> None:
    for user in ("u", "u", "v", ""):
        await client.generate(LONG[:5], max_tokens=1, user=user)
    salts = [ticket.salt for ticket in decode.seen.tickets]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    with pytest.raises(InvalidFieldError, match="user"):
        await client.generate(LONG[:5], max_tokens=1, user="u" * 1025)


async def test_a_stream_that_nobody_reads_gives_its_place_back(
    model_dir: Path, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "UNREAD_SECONDS_MAX", 0.1)
    limits: dict[str, Any] = {"request_timeout_seconds": 2.0, "queue_timeout_seconds": 0.5}
    async with (
        running_router(model_dir, [decode], prefill_replicas=0, **limits) as router,
        grpc.aio.insecure_channel(router.grpc_address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        request = router_pb2.GenerateRequest(text="Hello")
        request.sampling.max_tokens = 4000
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.GenerateStream(request)
        await call.read()
        await until(lambda: not decode.live)
        assert router.front.admission.running == 1, "the answer waits to be read"
        await until(lambda: router.front.admission.running == 0)
        call.cancel()
