"""A served cluster under the clients that people have, unmodified: openai, anthropic, reflection over gRPC, curl, and a
load generator that sends what `vllm bench serve` sends."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any, Literal

import anthropic
import grpc
import httpx
import jsonschema
import openai
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pydantic import BaseModel

from tests.e2e.served_cluster import ServedCluster
from whalepod.client import AsyncClient, Client
from whalepod.cluster.grpc_options import channel_options
from whalepod.core.errors import InvalidFieldError
from whalepod.engine.interface import FinishReason

pytestmark = pytest.mark.slow

MODEL = "whalepod-tiny"
PROMPT = "It was a bright cold day, and the clocks were striking. " * 12
USER: Any = [{"role": "user", "content": "Hello"}]
OFF = {"thinking": {"type": "disabled"}}
SEED = {"seed": 3}
"""With it the model, whose weights are random, comes to the end of its calls."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"], "type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}


class Answer(BaseModel):
    name: Literal["a", "b"]
    sure: bool


@pytest.fixture(name="oai")
def openai_client(cluster: ServedCluster) -> Any:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(name="claude")
def anthropic_client(cluster: ServedCluster) -> Any:
    return anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=60)


# ------------------------------------------------------------------------------------------------------------- openai


def test_openai_chat_streams_what_it_answers(oai: Any) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 12, "temperature": 0, "extra_body": OFF}
    whole = oai.chat.completions.create(**asked)
    chunks = list(oai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.completion_tokens, whole.usage.completion_tokens) == (12, 12)
    assert whole.choices[0].finish_reason == "length"
    assert oai.models.list().data[0].id == MODEL


def test_openai_chat_thinks_by_default(oai: Any) -> None:
    answer = oai.chat.completions.create(model=MODEL, messages=USER, max_completion_tokens=6, reasoning_effort="low")
    message = answer.choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6


def test_openai_chat_calls_tools_whole_and_streamed(oai: Any) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "tools": [TOOL], "tool_choice": "required", "seed": 3}
    asked |= {"extra_body": OFF, "max_tokens": 400}
    whole = oai.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    for call in whole.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    with oai.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message
    calls = final.tool_calls
    assert calls
    jsonschema.validate(json.loads(calls[0].function.arguments), PARAMETERS)
    turns: Any = [
        *USER,
        whole.message,
        {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sun"},
    ]
    after = oai.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=4, extra_body=OFF)
    assert after.choices[0].finish_reason == "length"


def test_openai_chat_parses_a_pydantic_answer(oai: Any) -> None:
    answer = oai.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Answer, max_tokens=200, extra_body=OFF
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    asked: Any = {"role": "user", "content": "Answer in json"}
    anything = oai.chat.completions.create(
        model=MODEL, messages=[asked], response_format={"type": "json_object"}, max_tokens=60, extra_body=OFF
    )
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)


def test_openai_chat_gives_log_probabilities_choices_and_stops(oai: Any) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 8, "temperature": 0, "extra_body": OFF}
    answer = oai.chat.completions.create(**asked, logprobs=True, top_logprobs=3, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 8
    assert all(token.logprob == max(top.logprob for top in token.top_logprobs) for token in logprobs.content)
    text = answer.choices[0].message.content or ""
    stop = text[3:5]
    cut = oai.chat.completions.create(**asked, stop=[stop])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text.split(stop)[0], "stop")


def test_openai_completions_of_text_ids_and_lists(oai: Any) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    whole = oai.completions.create(**asked, prompt=PROMPT, logprobs=2)
    streamed = oai.completions.create(**asked, prompt=PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 6
    two = oai.completions.create(**asked, prompt=["one", "two"], n=2, echo=True)
    assert [choice.text[:3] for choice in two.choices] == ["one", "one", "two", "two"]
    scored = oai.completions.create(**{**asked, "max_tokens": 1}, prompt=PROMPT, echo=True, logprobs=1).choices[0]
    assert scored.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in scored.logprobs.token_logprobs[1:])
    assert "".join(scored.logprobs.tokens[1:]) == scored.text
    ids = oai.completions.create(**asked, prompt=[[5, 6, 7]], extra_body={"return_token_ids": True})
    assert ids.choices[0].model_extra is not None
    assert len(ids.choices[0].model_extra["token_ids"]) == 6


def test_openai_responses_whole_streamed_and_parsed(oai: Any) -> None:
    asked: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "reasoning": {"effort": "none"}}
    whole = oai.responses.create(**asked, temperature=0)
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    with oai.responses.stream(**asked, temperature=0) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 12
    parsed = oai.responses.parse(**{**asked, "max_output_tokens": 200}, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    thought = oai.responses.create(model=MODEL, input="Hello", max_output_tokens=6)
    assert thought.output[0].type == "reasoning"


def test_openai_responses_call_tools_and_go_on_from_what_was_said(oai: Any) -> None:
    asked: Any = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "none"}}
    asked |= {"extra_body": SEED}
    first = oai.responses.create(**asked, input="Hello", tool_choice="required", max_output_tokens=400)
    calls = [item for item in first.output if item.type == "function_call"]
    jsonschema.validate(json.loads(calls[0].arguments), PARAMETERS)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    turns: Any = [*USER, *first.output, *results]
    assert oai.responses.create(**asked, input=turns, max_output_tokens=4).usage is not None
    with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
        oai.responses.create(**asked, input="And?", previous_response_id=first.id)


def test_openai_raises_its_own_errors(oai: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        oai.chat.completions.create(model="gpt", messages=USER)
    with pytest.raises(openai.BadRequestError) as refused:
        oai.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        oai.completions.create(model=MODEL, prompt=[[5] * 200_000], max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


# ---------------------------------------------------------------------------------------------------------- anthropic


def test_anthropic_messages_whole_and_streamed(claude: Any) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 12, "thinking": OFF["thinking"]}
    asked |= {"extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert final.usage == whole.usage
    counted = claude.messages.count_tokens(model=MODEL, messages=USER, thinking={"type": "disabled"})
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_thinks_calls_tools_and_stops(claude: Any) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    thought = claude.messages.create(model=MODEL, messages=USER, max_tokens=8, thinking=thinking)
    assert thought.content[0].type == "thinking"
    tool: Any = {"name": "weather", "input_schema": PARAMETERS, "strict": True}
    asked: Any = {"model": MODEL, "messages": USER, "tools": [tool], "max_tokens": 400, "extra_body": SEED}
    called = claude.messages.create(**asked, tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    uses = [block for block in called.content if block.type == "tool_use"]
    jsonschema.validate(uses[0].input, PARAMETERS)
    with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "weather"}) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    jsonschema.validate(streamed[0].input, PARAMETERS)
    results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"} for use in uses]
    turns: Any = [*USER, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    after = claude.messages.create(**{**asked, "messages": turns, "max_tokens": 4}, thinking={"type": "disabled"})
    assert after.role == "assistant"


def test_anthropic_parses_a_pydantic_answer_and_raises_its_own_errors(claude: Any) -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 200, "thinking": {"type": "disabled"}}
    parsed = claude.messages.parse(**asked, output_format=Answer)
    assert isinstance(parsed.parsed_output, Answer)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**asked, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**asked, extra_body={"temperature": 9})


# --------------------------------------------------------------------------------------------------------------- gRPC


def test_grpc_by_reflection_alone(cluster: ServedCluster) -> None:
    """As grpcurl does: nothing is known but the address."""
    with grpc.insecure_channel(f"127.0.0.1:{cluster.config.router.grpc_port}", options=channel_options()) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = next(name for name in database.get_services() if name.endswith("RouterService"))
        methods = DescriptorPool(database).FindServiceByName(service).methods_by_name
        request_class = message_factory.GetMessageClass(methods["Generate"].input_type)
        response_class = message_factory.GetMessageClass(methods["Generate"].output_type)
        generate: Any = channel.unary_unary(
            f"/{service}/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        request: Any = request_class()
        request.token_ids.ids.extend([5, 6, 7])
        request.sampling.max_tokens = 5
        response = generate(request, timeout=60)
        assert (len(response.token_ids), response.usage.completion_tokens) == (5, 5)
        chat_class = message_factory.GetMessageClass(methods["Chat"].input_type)
        answer_class = message_factory.GetMessageClass(methods["Chat"].output_type)
        chat: Any = channel.unary_unary(
            f"/{service}/Chat",
            request_serializer=chat_class.SerializeToString,
            response_deserializer=answer_class.FromString,
        )
        body = json.dumps({"messages": USER, "max_tokens": 5, **OFF})
        answer = json.loads(chat(chat_class(body_json=body), timeout=60).body_json)
        assert answer["usage"]["completion_tokens"] == 5


async def test_our_own_clients_give_the_same_tokens_whole_and_streamed(cluster: ServedCluster) -> None:
    address = f"127.0.0.1:{cluster.config.router.grpc_port}"

    def with_the_plain_one() -> list[tuple[int, ...]]:
        with Client(address) as client:
            whole = client.generate([5, 6, 7], max_tokens=6)
            assert whole.finish_reason is FinishReason.LENGTH
            with pytest.raises(InvalidFieldError):
                client.generate([10**9], max_tokens=6)
            return [tuple(token for delta in client.stream(PROMPT, max_tokens=6) for token in delta.token_ids)]

    (streamed,) = await asyncio.to_thread(with_the_plain_one)
    async with AsyncClient(address) as client:
        ids: list[int] = []
        async for delta in client.stream(PROMPT, max_tokens=6):
            ids += delta.token_ids
        assert len(ids) == len(streamed) == 6


# ----------------------------------------------------------------------------------------------------- curl and loads


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "stream": True}, "data: [DONE]"),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "stream": True}, "data: [DONE]"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "stream": True}, '"type":"response.incomplete"'),
        ("/v1/messages", {"messages": USER, "max_tokens": 4, "stream": True}, 'data: {"type":"message_stop"}'),
        ("/tokenize", {"prompt": "Hello"}, '"count":'),
        ("/detokenize", {"tokens": [5, 6, 7]}, '"prompt":'),
    ],
)
def test_plain_curl(cluster: ServedCluster, path: str, body: dict[str, Any], last: str) -> None:
    command = ["curl", "-sSN", "--fail-with-body", "--max-time", "60", cluster.url + path, "-d", json.dumps(body)]
    command += ["-H", "content-type: application/json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert last in printed.strip().splitlines()[-1]


@pytest.mark.parametrize("chat", [False, True], ids=["openai", "openai-chat"])
async def test_what_a_load_generator_sends_is_answered_in_full(cluster: ServedCluster, chat: bool) -> None:
    """The bodies of `vllm bench serve` with `--ignore-eos`, some at a time, read as it reads them."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def load(number: int) -> tuple[int, int]:
            common = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
            prompt = f"{number} {PROMPT}"
            if chat:
                content = [{"type": "text", "text": prompt}]
                body = {**common, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 8}
            else:
                body = {**common, "prompt": prompt, "max_tokens": 8, "repetition_penalty": 1.0, "logprobs": None}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            headers = {"Authorization": "Bearer none", "x-request-id": f"bench-{number}"}
            texts, counted = 0, 0
            async with client.stream("POST", path, json=body, headers=headers) as response:
                assert response.headers["x-request-id"] == f"bench-{number}"
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    texts += len(chunk["choices"])
                    counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
            return texts, counted

        results = await asyncio.gather(*(load(number) for number in range(8)))
    assert all(texts > 0 and counted == 8 for texts, counted in results), results
