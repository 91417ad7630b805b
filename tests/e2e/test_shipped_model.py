"""The model that ships, in a served cluster, under the unmodified `openai` client: it speaks English, follows a schema
and calls tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster

pytestmark = pytest.mark.slow

MODEL = "whalepod-tiny"
OFF = {"thinking": {"type": "disabled"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {"type": "string", "description": "Name of the city"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module", name="oai")
def client_of_the_shipped_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    flags = ("--log-level", "warning")
    with served_cluster(tmp_path_factory.mktemp("shipped"), *flags, shipped_model=True) as cluster:
        yield _client(cluster)


def _client(cluster: ServedCluster) -> Any:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def said(oai: Any, content: str, **fields: Any) -> Any:
    asked: Any = [{"role": "user", "content": content}]
    answer = oai.chat.completions.create(
        model=MODEL, messages=asked, temperature=0, max_tokens=160, extra_body=OFF, **fields
    )
    return answer.choices[0]


def test_it_tells_a_story_in_words(oai: Any) -> None:
    story = said(oai, "Tell me a story about a cat named Tom.")
    assert story.finish_reason == "stop"
    words = re.findall(r"[A-Za-z']+", story.message.content)
    assert len(words) > 20
    assert len(set(words)) > len(words) / 3, "it does not say the same again and again"
    assert "Tom" in words


def test_a_schema_is_followed_with_what_the_text_says(oai: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    asked = "Mia is 7 years old. Mia lives in Paris. Write that as JSON."
    answer = said(oai, asked, response_format=form)
    assert answer.finish_reason == "stop"
    value = json.loads(answer.message.content)
    jsonschema.validate(value, SCHEMA)
    assert value["age"] == 7


def test_a_tool_is_called_with_arguments_that_its_schema_allows(oai: Any) -> None:
    answer = said(oai, "What is the weather in Paris?", tools=[WEATHER])
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    assert arguments == {"city": "Paris"}
