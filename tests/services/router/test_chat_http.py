"""`/v1/chat/completions` over HTTP: the released prompt layer in front, its parser behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.services.router.fake_ranks import FakeDecode, FakePrefill, says
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
THINK_END_ID: int = TOKENIZER.file.encode("</think>", add_special_tokens=False).ids[0]
CHAT = "/v1/chat/completions"
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
THINKING: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
JSON_PLEASE = {"messages": [{"role": "user", "content": "Answer in json"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def tool_with(properties: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    function = {"name": "t", "strict": strict, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


CALL = (
    "Let me look.\n\n<｜DSML｜tool_calls>"
    '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'
    "</｜DSML｜invoke></｜DSML｜tool_calls>"
)


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
    """Tokens of an answer, with the special spellings as single tokens."""
    return TOKENIZER.file.encode(text, add_special_tokens=False).ids


async def ask(router: RouterUnderTest, **body: Any) -> dict[str, Any]:
    response = await router.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def ask_streamed(router: RouterUnderTest, **body: Any) -> list[dict[str, Any]]:
    body.pop("stream", None)
    body.setdefault("prompt", None)
    events = await router.stream(CHAT, **body)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def accumulate(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client puts together from the deltas of one choice."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    finish: list[str] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        for key in ("content", "reasoning_content"):
            if choice["delta"].get(key) is not None:
                message[key] = message.get(key, "") + choice["delta"][key]
        for call in choice["delta"].get("tool_calls") or []:
            if call["index"] == len(calls):
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return {**message, "calls": calls, "finish": finish}


def whole(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    choice = answer["choices"][index]
    message = {key: choice["message"][key] for key in ("content", "reasoning_content") if choice["message"].get(key)}
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in choice["message"].get("tool_calls") or []
    ]
    return {**message, "calls": calls, "finish": [choice["finish_reason"]]}


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        ("A plain answer, Grüße 🐋", PLAIN),
        ("I think so.</think>\n\nYes.", THINKING),
        ("I never stop thinking", THINKING),
        ("Before the stop, after it", PLAIN | {"stop": ["stop"]}),
        ("Not the stop here</think>but a stop there", THINKING | {"stop": ["stop"]}),
        (CALL, PLAIN | {"tools": [TOOL]}),
        ("So</think>" + CALL, THINKING | {"tools": [TOOL]}),
        ("With numbers", PLAIN | {"logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_a_stream_says_what_the_whole_answer_says(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, burst: int, answer: str, body: dict[str, Any]
) -> None:
    for rank in (decode, prefill):
        rank.behaviour.next_token = says(spell(answer))
        rank.behaviour.burst = burst
    response = await ask(router, **body)
    chunks = await ask_streamed(router, **body)
    expected = whole(response)
    streamed = {key: value for key, value in accumulate(chunks).items() if value or key in ("calls", "finish")}
    assert streamed == expected
    assert chunks[-1]["usage"] == response["usage"]
    assert decode.live == {}


async def test_reasoning_is_parted_from_the_answer_and_counted(router: RouterUnderTest, decode: FakeDecode) -> None:
    ids = spell("I think so.</think>\n\nYes.")
    decode.behaviour.next_token = says(ids)
    answer = await ask(router, **THINKING, max_tokens=64)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I think so.", "Yes.")
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(ids) + 1, "the end of the sequence was generated too"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == ids.index(THINK_END_ID)


async def test_reasoning_of_broken_bytes_is_counted_in_tokens(router: RouterUnderTest, decode: FakeDecode) -> None:
    broken = [token_id for token_id in range(TOKENIZER.ids_end) if TOKENIZER.token_bytes(token_id) == b"\x80"]
    decode.behaviour.next_token = says(broken * 8)
    usage = (await ask(router, **THINKING, max_tokens=8))["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 8


async def test_spelling_a_marker_in_plain_letters_closes_nothing(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("I write </think> and go on"))
    answer = await ask(router, **THINKING, max_tokens=64)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "I write </think> and go on"
    assert not message["content"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_b1_exactly_max_tokens_come_back(router: RouterUnderTest, name: str, max_tokens: int) -> None:
    answer = await ask(router, **PLAIN, **{name: max_tokens}, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens


async def test_a_tool_call_arrives_with_its_arguments(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(spell(CALL))
    answer = await ask(router, **PLAIN, tools=[TOOL])
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_n_choices_are_streamed_side_by_side_and_paid_for_together(router: RouterUnderTest) -> None:
    body = {**PLAIN, "n": 3, "seed": 5, "max_tokens": 6}
    answer = await ask(router, **body)
    chunks = await ask_streamed(router, **body)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(contents)) == 3
    assert [accumulate(chunks, index)["content"] for index in range(3)] == contents
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == 18
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


async def test_log_probabilities_come_one_for_each_token(router: RouterUnderTest) -> None:
    answer = await ask(router, **PLAIN, max_tokens=4, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert [len(token["top_logprobs"]) for token in content] == [2] * 4
    first = len(answer["choices"][0]["logprobs"]["content"][0]["token"])
    assert first > 0


async def test_ids_come_back_when_asked_for_streamed_and_not(router: RouterUnderTest) -> None:
    answer = await ask(router, **PLAIN, max_tokens=5, return_token_ids=True)
    chunks = await ask_streamed(router, **PLAIN, max_tokens=5, return_token_ids=True)
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert ids == answer["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("more", [{}, {"stop": ["swims"]}, {"n": 2}], ids=["alone", "stop string", "two choices"])
async def test_ids_of_text_that_is_held_back_come_with_the_next_chunk(
    router: RouterUnderTest, decode: FakeDecode, more: dict[str, Any]
) -> None:
    """Bytes of one character are several tokens, and the end of a sequence has no text."""
    decode.behaviour.next_token = says(spell("Grüße 🐋 swims"))
    body = {**PLAIN, "max_tokens": 60, "return_token_ids": True, **more}
    answer = await ask(router, **body)
    told: dict[int, list[int]] = {}
    for chunk in await ask_streamed(router, **body):
        for choice in chunk["choices"]:
            told.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert told == {choice["index"]: choice["token_ids"] for choice in answer["choices"]}


async def test_d7_the_whole_conversation_is_the_prompt(router: RouterUnderTest, decode: FakeDecode) -> None:
    for second in ("one", "two"):
        messages = [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "First"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": second},
        ]
        await ask(router, messages=messages, thinking={"type": "disabled"}, max_tokens=1)
    one, two = [list(work.prompt_ids) for work in decode.seen.starts]
    assert one != two
    assert one[:8] == two[:8]


@pytest.mark.parametrize("stream", [None, False])
async def test_null_is_the_same_as_unset(router: RouterUnderTest, decode: FakeDecode, stream: bool | None) -> None:
    decode.behaviour.next_token = says(spell("Yes"))
    names = (
        "temperature", "top_p", "n", "stream_options", "stop", "max_tokens", "max_completion_tokens", "logprobs",
        "top_logprobs", "tools", "tool_choice", "response_format", "seed", "user", "top_k", "min_p", "logit_bias",
        "allowed_token_ids", "bad_words",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs", "functions", "model",
        "return_token_ids", "cache_salt", "priority", "fidelity", "min_tokens", "ignore_eos", "stop_token_ids",
    )  # fmt: skip
    plain = await ask(router, **PLAIN)
    nulls = await ask(router, **PLAIN, stream=stream, **dict.fromkeys(names))
    assert {**plain, "id": 0, "created": 0} == {**nulls, "id": 0, "created": 0}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("functions", {"functions": [TOOL["function"]]}),
        ("include_stop_str_in_output", {"include_stop_str_in_output": True, "stop": "x"}),
    ],
)  # fmt: skip
async def test_what_is_not_done_is_refused_and_not_pretended(
    router: RouterUnderTest, decode: FakeDecode, field: str, body: dict[str, Any]
) -> None:
    response = await router.http.post(CHAT, json={**PLAIN, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert "not supported" in response.json()["error"]["message"]
    assert decode.seen.starts == []


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({"response_format": {"type": "json_object"}, **JSON_PLEASE}, GrammarSpec(GrammarKind.JSON_OBJECT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}'),
        ),
        ({"response_format": {"type": "regex", "regex": "a+"}}, GrammarSpec(GrammarKind.REGEX, "a+")),
        ({"guided_json": {"type": "null"}}, GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, GrammarSpec(GrammarKind.REGEX, r"(?:a\.b)|(?:c)")),
    ],
)
async def test_what_an_answer_must_look_like_reaches_the_rank(
    router: RouterUnderTest, decode: FakeDecode, body: dict[str, Any], spec: GrammarSpec
) -> None:
    for thinks in (False, True):
        thinking = {"type": "enabled" if thinks else "disabled"}
        await ask(router, **{**PLAIN, **body, "thinking": thinking, "n": 2, "max_tokens": 2})
        for work in decode.seen.starts[-2:]:
            assert work.sampling.grammar == spec
            assert work.sampling.grammar_starts_after == (THINK_END_ID if thinks else None)


@pytest.mark.parametrize(
    ("body", "opened"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
        ({"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}, False),
        ({"response_format": {"type": "json_object"}, **JSON_PLEASE}, False),
        ({}, None),
    ],
)
async def test_calls_of_tools_that_were_promised_are_followed(
    router: RouterUnderTest, decode: FakeDecode, body: dict[str, Any], opened: bool | None
) -> None:
    await ask(router, **{**PLAIN, "tools": [TOOL], **body, "max_tokens": 2})
    spec = decode.seen.starts[-1].sampling.grammar
    assert (None if spec is None else json.loads(spec.source)["opened"]) is opened
    assert spec is None or spec.kind is GrammarKind.TOOL_CALLS


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tool_choice", {"tool_choice": "required", "tools": [tool_with({'a"b': {"type": "integer"}}, strict=False)]}),
        ("tools", {"tools": [tool_with({"a": {"type": "string", "pattern": "(?=a)"}}, strict=True)]}),
        ("guided_regex", {"guided_regex": "a", "tools": [TOOL]}),
    ],
)
async def test_tools_that_cannot_be_followed_are_refused(
    router: RouterUnderTest, decode: FakeDecode, field: str, body: dict[str, Any]
) -> None:
    response = await router.http.post(CHAT, json={**PLAIN, **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert decode.seen.starts == []


async def test_two_formats_for_one_answer_are_one_too_many(router: RouterUnderTest, decode: FakeDecode) -> None:
    body = {"response_format": {"type": "regex", "regex": "a"}, "guided_json": {}}
    response = await router.http.post(CHAT, json={**PLAIN, **body})
    assert response.json()["error"]["param"] == "guided_json"
    assert "response_format and guided_json" in response.json()["error"]["message"]
    assert decode.seen.starts == []


async def test_extras_reach_the_rank_beside_what_the_prompt_layer_resolves(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    await ask(
        router, **PLAIN, temperature=0.5, seed=7, top_k=3, min_p=0.25, repetition_penalty=1.5, min_tokens=2,
        max_tokens=4, logit_bias={"9": 2}, stop_token_ids=[3], allowed_token_ids=[3, 9], bad_words=["zq"],
    )  # fmt: skip
    sampling = decode.seen.starts[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k, sampling.min_p) == (0.5, 7, 3, 0.25)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.max_tokens) == (1.5, 2, 4)
    assert (dict(sampling.logit_bias), sampling.stop_token_ids) == ({9: 2.0}, (3,))
    assert (sampling.allowed_token_ids, len(sampling.bad_word_ids)) == ((3, 9), 2)
