"""Whatever a client sends: a truthful refusal that names the field, no rank touched, and the next request works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.core.errors import InvalidFieldError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="ranks")
async def ranks_of_all_tests() -> tuple[FakeDecode, FakePrefill]:
    return FakeDecode(), FakePrefill()


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="router")
async def one_router_for_all_tests(
    model_dir: Path, ranks: tuple[FakeDecode, FakePrefill]
) -> AsyncIterator[RouterUnderTest]:
    async with running_router(model_dir, ranks, remote_prefill_tokens_min=32) as running:
        yield running


@pytest.fixture(autouse=True)
def _as_good_as_new(ranks: tuple[FakeDecode, FakePrefill]) -> None:
    for rank in ranks:
        rank.reset()


@pytest.fixture
def decode(ranks: tuple[FakeDecode, FakePrefill]) -> FakeDecode:
    return ranks[0]


@pytest.fixture
def prefill(ranks: tuple[FakeDecode, FakePrefill]) -> FakePrefill:
    return ranks[1]


async def check_refused(
    router: RouterUnderTest, decode: FakeDecode, response: httpx.Response, status: int, param: str | None
) -> None:
    """Refused as said, in OpenAI's form, before any rank; and whoever comes next is served."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert decode.seen.starts == []
    await router.complete(prompt="next", max_tokens=1)
    assert router.front.admission.running == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("n", 1.0),
        ("stream", "yes"),
        ("stream_options", [1]),
        ("stream_options", {"include_usage": "yes"}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("echo", "no"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", "x" * 2000),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {"\uff11": 1}),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"5": 1, "05": -1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", [1]),
        ("seed", 2**63),
        ("seed", 1.5),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [99999999]),
        ("stop_token_ids", ["a"]),
        ("fidelity", "perfect"),
        ("cache_salt", "s" * 1025),
        ("cache_salt", 7),
        ("priority", "high"),
        ("best_of", 2),
        ("add_special_tokens", False),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [99999999]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["5"]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [5] * 16385),
        ("bad_words", [""]),
        ("bad_words", ["x"] * 65),
        ("bad_words", ["x" * 257]),
        ("bad_words", ["\u1234" * 200]),
        ("bad_words", [5]),
        ("bad_words", "never"),
        ("truncate_prompt_tokens", 5),
        ("return_tokens_as_token_ids", True),
        ("suffix", "after"),
        ("prompt_logprobs", 21),
        ("user", "u" * 1025),
        ("response_format", {"type": "xml"}),
        ("response_format", "json_object"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "no schema"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "sting"}}}),
        ("response_format", {"type": "regex", "regex": "(?=a)b"}),
        ("structured_outputs", {"json": "{"}),
        ("structured_outputs", {"yaml": "a"}),
        ("structured_outputs", ["json"]),
        ("guided_regex", "a("),
        ("guided_regex", 7),
        ("guided_json", {"enum": []}),
        ("guided_choice", []),
        ("guided_choice", "yes"),
        ("guided_choice", [1]),
        ("guided_grammar", "root ::= x"),
        ("guided_json_object", "yes"),
        ("prompt", [["a"]]),
    ],
)
async def test_a_bad_value_is_refused_by_the_name_of_its_field(
    router: RouterUnderTest, decode: FakeDecode, field: str, value: Any
) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": "Hello", field: value})
    await check_refused(router, decode, response, 400, field)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, [["a"]], "\ud800"])
@pytest.mark.parametrize("max_tokens", [0, None, -1, 2**31, 2**70])
async def test_b9_empty_prompts_and_odd_lengths_are_refused(
    router: RouterUnderTest, decode: FakeDecode, prompt: Any, max_tokens: Any
) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens})
    response = await router.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.json()["error"]["param"] in ("prompt", "max_tokens")
    await check_refused(router, decode, response, 400, response.json()["error"]["param"])


@pytest.mark.parametrize("max_tokens", [2**31, 2**70, 4096])
async def test_b9_more_tokens_than_fit_are_refused(
    router: RouterUnderTest, decode: FakeDecode, max_tokens: int
) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": max_tokens})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    await check_refused(router, decode, response, 400, "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", None),
        ("messages", "Hi"),
        ("messages", [{"role": "robot", "content": "Hi"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [7]),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("temperature", 3),
        ("temperature", "x"),
        ("top_p", 0),
        ("top_logprobs", 21),
        ("n", 0),
        ("stop", ["x"] * 17),
        ("seed", -1),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "sometimes"),
        ("top_k", -5),
        ("min_p", 2),
        ("chat_template_kwargs", 7),
        ("chat_template_kwargs", {"thinking": "false"}),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "sting"}}}),
        ("guided_regex", "a("),
        ("structured_outputs", {"grammar": "start: x"}),
        ("stop_token_ids", [10**9]),
    ],
)
async def test_a_bad_value_in_a_conversation_is_refused_by_name(
    router: RouterUnderTest, decode: FakeDecode, field: str, value: Any
) -> None:
    response = await router.http.post("/v1/chat/completions", json={**CHAT, field: value})
    await check_refused(router, decode, response, 400, field)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"messages": [{"role": "user"}], "max_tokens": 1}, "messages"),
        ("/v1/messages", {**CHAT, "max_tokens": "x" * 100_000}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": "x" * 100_000}, "max_tokens"),
        ("/v1/responses", {"input": "a", "tools": "x" * 100_000}, "tools"),
        ("/v1/completions", {"prompt": "a", "top_k": 10**4000}, "top_k"),
        ("/v1/completions", {"prompt": "a", "model": "x" * 100_000}, "model"),
    ],
)
async def test_a_message_names_the_field_in_every_protocol_and_stays_short(
    router: RouterUnderTest, path: str, body: dict[str, Any], field: str
) -> None:
    response = await router.http.post(path, json=body)
    message = response.json()["error"]["message"]
    assert field in message
    assert len(message) < 2100


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "\ud800", "content": "a"}]},
        {**CHAT, "model": "\ud800"},
        {**CHAT, "user\ud800": "\ud800", "stop": ["\ud800"]},
        {**CHAT, "logit_bias": {"\ud800": 1}},
        {**CHAT, "bad_words": ["\ud800"]},
    ],
)
async def test_half_a_surrogate_pair_is_the_clients_fault_wherever_it_stands(
    router: RouterUnderTest, body: dict[str, Any]
) -> None:
    response = await router.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 404), response.text
    await router.complete(prompt="next", max_tokens=1)


@pytest.mark.parametrize("over", [1, 9, 4096])
@pytest.mark.parametrize("prefill_context", [1000, 9000])
async def test_b5_a_prompt_over_the_limit_is_refused_before_any_dispatch(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, over: int, prefill_context: int
) -> None:
    prefill.server.context_tokens_max = prefill_context
    response = await router.http.post("/v1/completions", json={"prompt": [400] * (4096 + over), "max_tokens": 1})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    await check_refused(router, decode, response, 400, "prompt")
    assert prefill.seen.starts == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [400] * 40, "model": "another"}),
        ("/v1/completions", {"prompt": [400] * 5000}),
        ("/v1/completions", {"prompt": [400] * 40, "guided_regex": "a("}),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x" * 200}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 10**6}),
        ("/v1/responses", {"input": "x" * 200, "tools": [{"type": "custom", "name": "code"}]}),
    ],
)
async def test_a5_what_a_decode_rank_would_refuse_costs_no_prefill_rank_a_block(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, path: str, body: dict[str, Any]
) -> None:
    responses = await asyncio.gather(*(router.http.post(path, json=body) for _ in range(10)))
    assert all(400 <= response.status_code < 500 for response in responses), responses[0].text
    assert (prefill.seen.starts, decode.seen.starts) == ([], [])


async def test_a5_a_decode_rank_that_refuses_all_the_same_ends_the_prefill_leg(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    decode.behaviour.refuse_with = InvalidFieldError("prompt", "too long for this rank")
    prefill.behaviour.hang = True
    responses = await asyncio.gather(
        *(router.http.post("/v1/completions", json={"prompt": [400] * 40, "max_tokens": 4}) for _ in range(10))
    )
    assert {response.status_code for response in responses} == {400}
    async with asyncio.timeout(1.0):
        while prefill.running:
            await asyncio.sleep(0.01)


async def test_b5_a_prompt_that_fits_the_decode_pool_alone_is_computed_there(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.server.context_tokens_max = 1000
    await router.complete(prompt=[400] * 1001, max_tokens=1)
    assert prefill.seen.starts == []
    await router.complete(prompt=[400] * 1000, max_tokens=2)
    assert len(prefill.seen.starts) == 1


async def test_b5_the_largest_decode_rank_decides_how_long_a_prompt_may_be(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.server.context_tokens_max = 100
    response = await router.http.post("/v1/completions", json={"prompt": [400] * 100, "max_tokens": 1})
    assert "context is 100 tokens" in response.json()["error"]["message"]
    await check_refused(router, decode, response, 400, "prompt")
    await router.complete(prompt=[400] * 99, max_tokens=1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_is_no_json_object_is_refused(
    router: RouterUnderTest, decode: FakeDecode, path: str, body: bytes
) -> None:
    response = await router.http.post(path, content=body, headers={"content-type": "application/json"})
    await check_refused(router, decode, response, 400, None)


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_of_another_type_is_refused(router: RouterUnderTest, decode: FakeDecode, media_type: str) -> None:
    response = await router.http.post(
        "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": media_type}
    )
    await check_refused(router, decode, response, 415, None)


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", "application/ld+json"])
async def test_every_spelling_of_json_is_read(router: RouterUnderTest, media_type: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    response = await router.http.post("/v1/completions", content=body, headers={"content-type": media_type})
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_too_large_is_refused_whether_or_not_it_says_so(
    router: RouterUnderTest, decode: FakeDecode, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalepod.services.router.app.BODY_BYTES_MAX", 100_000)

    async def in_chunks() -> Any:
        for _ in range(20):
            yield b"x" * 10_000

    content: Any = in_chunks() if chunked else b"x" * 200_000
    response = await router.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    await check_refused(router, decode, response, 413, None)


async def test_another_model_is_not_found(router: RouterUnderTest, decode: FakeDecode) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = await router.http.post(path, json={**body, "model": "gpt"})
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.status_code == 404
    assert decode.seen.starts == []


async def test_unknown_paths_and_methods_are_refused_in_the_same_form(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    await check_refused(router, decode, await router.http.get("/nothing/here"), 404, None)
    decode.seen.starts.clear()
    response = await router.http.get("/v1/completions")
    assert "POST" in response.headers["allow"]
    await check_refused(router, decode, response, 405, None)


async def test_bytes_that_are_no_http_do_not_stop_the_server(router: RouterUnderTest) -> None:
    for junk in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        writer.write(junk)
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(5):
            await reader.read()
        writer.close()
        await router.complete(prompt="next", max_tokens=1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"prompt": "x", "max_tokens": %s}', "max_tokens"),
        ('{"max_tokens": -%s, "prompt": "x"}', "max_tokens"),
        ('{"prompt": [1, 2, %s]}', "prompt.2"),
        ('{"prompt": "x", "logit_bias": {"5": %s}}', "logit_bias.5"),
        ('{"prompt": "x", "a field of tomorrow": [{"y": %s}]}', "a field of tomorrow.0.y"),
    ],
)
async def test_an_integer_that_no_parser_reads_is_refused_by_its_field(
    router: RouterUnderTest, decode: FakeDecode, body: str, field: str
) -> None:
    content = body % ("9" * 5000)
    headers = {"content-type": "application/json"}
    response = await router.http.post("/v1/completions", content=content, headers=headers)
    await check_refused(router, decode, response, 400, field.split(".", maxsplit=1)[0])
    message = response.json()["error"]["message"]
    assert f"{field} is an integer of 5000 digits" in message
    assert "at most 4300" in message


@pytest.mark.parametrize("body", ['{"n": %s', "%s"])
async def test_what_is_no_object_and_has_a_long_integer_names_no_field(
    router: RouterUnderTest, decode: FakeDecode, body: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await router.http.post("/v1/completions", content=body % ("9" * 5000), headers=headers)
    await check_refused(router, decode, response, 400, None)
