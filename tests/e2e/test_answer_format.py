"""Answers of a given form, through a whole served cluster: prefill rank, hand-off, decode rank."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.e2e.served_cluster import ServedCluster

pytestmark = pytest.mark.slow

LONG = "It was a bright cold day, and the clocks were striking. " * 12
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "count", "kinds"],
    "additionalProperties": False,
}


def post(cluster: ServedCluster, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    with cluster.client() as client:
        response = client.post(path, json=body)
    return response.status_code, response.json()


def test_a_schema_is_followed_across_the_hand_off_whatever_is_drawn(cluster: ServedCluster) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for draw in ({"temperature": 0}, {"seed": 1}, {"seed": 2}):
        body = {"prompt": LONG, "max_tokens": 120, "response_format": asked, **draw}
        status, answer = post(cluster, "/v1/completions", **body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)


def test_a_conversation_thinks_first_and_then_answers_in_form(cluster: ServedCluster) -> None:
    messages = [{"role": "user", "content": "A number, please."}]
    body = {"messages": messages, "structured_outputs": {"regex": r"\d{2,4}"}, "max_tokens": 24}
    status, answer = post(cluster, "/v1/chat/completions", **body, thinking={"type": "disabled"})
    assert status == 200, answer
    assert re.fullmatch(r"\d{2,4}", answer["choices"][0]["message"]["content"])
    status, answer = post(cluster, "/v1/chat/completions", **body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length", "random weights never close their reasoning"
    assert not answer["choices"][0]["message"]["content"]


def test_a_grammar_that_never_compiles_is_refused_while_others_are_served(cluster: ServedCluster) -> None:
    endless = "start: A\nA: " + " & ".join(f"/(.*a.{{{index}}}.*)/" for index in range(30))
    status, answer = post(cluster, "/v1/completions", prompt="a", guided_grammar=endless)
    assert status == 400
    assert answer["error"]["param"] == "guided_grammar"
    assert "takes longer" in answer["error"]["message"]
    status, answer = post(cluster, "/v1/completions", prompt="a", guided_choice=["yes", "no"])
    assert answer["choices"][0]["text"] in ("yes", "no")
