"""`/v1/responses` and `/v1/messages`: the released layer's events, with our counts, for every way to bundle tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.services.router.fake_ranks import FakeDecode, FakePrefill, says
from tests.services.router.router_under_test import RouterUnderTest, check_nothing_is_left, running_router
from whalepod.core.errors import InternalError
from whalepod.engine.grammar.spec import GrammarKind
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NOT_THINKING: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "Hi", "reasoning": {"effort": "none"}},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "thinking": {"type": "disabled"},
    },
}
THINKING = {
    path: {k: v for k, v in body.items() if k not in ("reasoning", "thinking")} for path, body in NOT_THINKING.items()
}
TOOLS = {
    RESPONSES: {"tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]},
    MESSAGES: {"tools": [{"name": "weather", "input_schema": PARAMETERS}]},
}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *[(path, "A plain answer, Grüße 🐋", NOT_THINKING[path]) for path in (RESPONSES, MESSAGES)],
    *[(path, "I think so.</think>\n\nYes.", THINKING[path]) for path in (RESPONSES, MESSAGES)],
    *[(path, "Let me look." + CALL, NOT_THINKING[path] | TOOLS[path]) for path in (RESPONSES, MESSAGES)],
    (MESSAGES, "Before the stop, after it", NOT_THINKING[MESSAGES] | {"stop_sequences": ["stop"]}),
    (RESPONSES, "With numbers", NOT_THINKING[RESPONSES] | {"top_logprobs": 2}),
]

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


def spell(text: str) -> list[int]:
    return TOKENIZER.file.encode(text, add_special_tokens=False).ids


async def ask(router: RouterUnderTest, path: str, **body: Any) -> dict[str, Any]:
    response = await router.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(router: RouterUnderTest, path: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of every event."""
    async with router.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        text = (await response.aread()).decode()
    events: list[tuple[str, dict[str, Any]]] = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def built_up(path: str, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What a client puts together from the events."""
    if path == RESPONSES:
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        return events[-1][1]["response"]
    message: dict[str, Any] = events[0][1]["message"]
    for name, data in events[1:]:
        if name == "content_block_start":
            message["content"].append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], dict(data["delta"])
            delta.pop("type")
            for key, piece in delta.items():
                field = "json" if key == "partial_json" else key
                block[field] = block[field] + piece
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    for block in message["content"]:
        spelled = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(spelled)
    return message


def comparable(answer: Any) -> Any:
    """Without what differs from answer to answer."""
    fresh = ("id", "created", "created_at", "completed_at", "call_id", "signature", "encrypted_content")
    if isinstance(answer, dict):
        return {key: comparable(value) for key, value in answer.items() if key not in fresh}
    return [comparable(one) for one in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize(("path", "answer", "body"), CASES)
async def test_a_stream_says_what_the_whole_answer_says(
    router: RouterUnderTest,
    decode: FakeDecode,
    prefill: FakePrefill,
    burst: int,
    path: str,
    answer: str,
    body: dict[str, Any],
) -> None:
    for rank in (decode, prefill):
        rank.behaviour.next_token = says(spell(answer))
        rank.behaviour.burst = burst
    whole = await ask(router, path, **body)
    events = await events_of(router, path, **body)
    assert comparable(built_up(path, events)) == comparable(whole)
    assert decode.live == {}


async def test_a_message_thinks_answers_and_counts_what_was_cached(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    ids = spell("I think so.</think>\n\nYes.")
    for rank in (decode, prefill):
        rank.behaviour.next_token, rank.behaviour.cached_tokens = says(ids), 4
    message = await ask(router, MESSAGES, **THINKING[MESSAGES])
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in message["content"]] == [
        ("thinking", "I think so."),
        ("text", "Yes."),
    ]
    assert (message["role"], message["stop_reason"]) == ("assistant", "end_turn")
    counted = (await ask(router, COUNT, **THINKING[MESSAGES]))["input_tokens"]
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (counted - 4, 4)
    assert usage["output_tokens"] == len(ids) + 1, "the end of the sequence was generated too"


async def test_a_message_calls_a_tool_and_takes_its_result(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(spell("Let me look." + CALL))
    body = NOT_THINKING[MESSAGES] | TOOLS[MESSAGES]
    message = await ask(router, MESSAGES, **body)
    text, call = message["content"]
    assert (text["text"], call["name"], call["input"]) == ("Let me look.", "weather", {"city": "Paris"})
    assert message["stop_reason"] == "tool_use"
    decode.behaviour.next_token = says(spell("Sunny."))
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
    turns = [*body["messages"], {"role": "assistant", "content": message["content"]}]
    message = await ask(router, MESSAGES, **{**body, "messages": [*turns, {"role": "user", "content": [result]}]})
    assert message["content"][0]["text"] == "Sunny."
    prompt = TOKENIZER.file.decode(list(decode.seen.starts[-1].prompt_ids), skip_special_tokens=False)
    assert "<tool_result>sun</tool_result>" in prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_demanded_tool_is_called_without_thinking_first(
    router: RouterUnderTest, decode: FakeDecode, choice: dict[str, str]
) -> None:
    await ask(router, MESSAGES, **THINKING[MESSAGES] | TOOLS[MESSAGES], tool_choice=choice)
    (start,) = decode.seen.starts
    grammar = start.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)["opened"]) == (GrammarKind.TOOL_CALLS, True)
    prompt = TOKENIZER.file.decode(list(start.prompt_ids), skip_special_tokens=False)
    assert prompt.endswith("</think>\n\n<｜DSML｜ calls>\n")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
)
@pytest.mark.parametrize("tools", [False, True])
async def test_a_schema_is_in_the_prompt_and_is_the_grammar_of_the_answer(
    router: RouterUnderTest, decode: FakeDecode, path: str, asked: dict[str, Any], tools: bool
) -> None:
    body = {**NOT_THINKING[path], **asked, **(TOOLS[path] if tools else {})}
    await ask(router, path, **body)
    grammar = decode.seen.starts[0].sampling.grammar
    assert grammar is not None
    source = json.loads(grammar.source)
    assert (source["content"] if tools else source) == SCHEMA
    prompt = TOKENIZER.file.decode(list(decode.seen.starts[0].prompt_ids), skip_special_tokens=False)
    assert "## Response Format" in prompt


async def test_a_response_repeats_its_settings(router: RouterUnderTest) -> None:
    asked = {"metadata": {"k": "v"}, "instructions": "Be brief.", "parallel_tool_calls": False, "max_output_tokens": 3}
    body = NOT_THINKING[RESPONSES] | asked
    events = await events_of(router, RESPONSES, **body)
    for response in (await ask(router, RESPONSES, **body), events[0][1]["response"], events[-1][1]["response"]):
        assert {name: response[name] for name in asked} == asked
        assert response["store"] is False
    assert events[-1][0] == "response.incomplete"
    assert events[-1][1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1][1]["response"]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("conversation", "conv_1"),
        ("n", 2),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]),
        ("temperature", 3),
        ("top_k", -7),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}),
    ],
)
async def test_what_a_response_cannot_do_is_refused_by_name(
    router: RouterUnderTest, decode: FakeDecode, field: str, value: object
) -> None:
    response = await router.http.post(RESPONSES, json={**NOT_THINKING[RESPONSES], field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
    assert decode.seen.starts == []


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"messages": []}, 400, "invalid_request_error", "message"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        ({"mcp_servers": [{"name": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"output_format": {"type": "xml"}}, 400, "invalid_request_error", "output_format"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        (
            {**TOOLS[MESSAGES], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": 9}},
            400,
            "invalid_request_error",
            "tool_choice",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "x"}}]}
                ]
            },
            400,
            "invalid_request_error",
            "document",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            400,
            "invalid_request_error",
            "images",
        ),
    ],
)
async def test_a_message_is_refused_in_anthropics_form(
    router: RouterUnderTest, decode: FakeDecode, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    response = await router.http.post(MESSAGES, json={**NOT_THINKING[MESSAGES], **body})
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind), answer
    assert said in answer["error"]["message"]
    assert decode.seen.starts == []


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_e10_a_stream_that_breaks_ends_with_an_error_event_and_nothing_else(
    router: RouterUnderTest, decode: FakeDecode, path: str
) -> None:
    decode.behaviour.next_token = says(spell("Once upon a time"))
    decode.behaviour.fail_after_tokens = (2, InternalError("the rank met a bug"))
    events = await events_of(router, path, **NOT_THINKING[path])
    names = [name for name, _ in events]
    assert names[-1] == "error"
    assert names.count("error") == 1
    assert not {"response.completed", "message_stop", "message_delta"} & set(names)
    assert "the rank met a bug" in events[-1][1]["error"]["message"]
    await check_nothing_is_left(router, decode)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a18_null_is_unset_in_every_field(router: RouterUnderTest, decode: FakeDecode, path: str) -> None:
    decode.behaviour.next_token = says(spell("Same"))
    names = ("stream", "temperature", "top_p", "tools", "tool_choice", "metadata", "top_k", "stop_sequences", "system")
    names += (
        "text",
        "include",
        "previous_response_id",
        "max_output_tokens",
        "instructions",
        "user",
        "seed",
        "cache_salt",
    )
    unset = await ask(router, path, **NOT_THINKING[path])
    null = await ask(router, path, **{**dict.fromkeys(names), **NOT_THINKING[path]})
    assert comparable(null) == comparable(unset)
    assert decode.seen.starts[0].sampling == decode.seen.starts[1].sampling


OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
A18_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi, and a few words more to be worth a hand-off to another rank.", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], **OFF, "max_tokens": 5},
    RESPONSES: {**NOT_THINKING[RESPONSES], "max_output_tokens": 5},
    MESSAGES: {**NOT_THINKING[MESSAGES], "max_tokens": 5},
}
A18_FIELDS: dict[str, Any] = {
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["zzz"],
    "stop_token_ids": [5],
    "min_tokens": 2,
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"300": 1},
    "allowed_token_ids": [*range(280, 400)],
    "bad_words": ["zzz"],
    "user": "u",
    "cache_salt": "s",
    "priority": 1,
    "fidelity": "exact",
    "metadata": {"user_id": "x"},
    "store": False,
}


@pytest.mark.slow
async def test_a18_every_protocol_and_field_means_the_same_with_and_without_a_prefill_rank(model_dir: Path) -> None:
    """Unset, null and set: what goes over two ranks is what one rank answers, and null is unset."""
    answers: dict[str, dict[tuple[str, str], Any]] = {}
    for mode in ("never", "always"):
        decode, prefill = FakeDecode(), FakePrefill()
        async with running_router(model_dir, [decode, prefill], remote_prefill=mode) as router:
            seen = answers.setdefault(mode, {})
            for path, body in A18_BODIES.items():
                null = dict.fromkeys(A18_FIELDS) | body
                bodies = {
                    "unset": body,
                    "null": null,
                    **{name: {**body, name: A18_FIELDS[name]} for name in A18_FIELDS},
                }
                told = await asyncio.gather(*(ask(router, path, **asked) for asked in bodies.values()))
                seen |= {(path, how): comparable(answer) for how, answer in zip(bodies, told, strict=True)}
        assert bool(prefill.seen.starts) == (mode == "always")
    assert answers["always"] == answers["never"]
    for path in A18_BODIES:
        assert answers["never"][path, "null"] == answers["never"][path, "unset"], path
