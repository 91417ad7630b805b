"""The ways to say what an answer must look like: one grammar, and the field that is to blame for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from whalepod.core.errors import InvalidFieldError
from whalepod.engine.grammar.python_regex import rust_regex
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.sampling_params import SamplingParams
from whalepod.services.router.answer_format import (
    AnswerFormat,
    chat_format,
    only_one,
    response_format,
    vllm_format,
)

NULL = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')
OBJECT = GrammarSpec(GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, OBJECT),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}, NULL),
        ({"type": "regex", "regex": "a"}, GrammarSpec(GrammarKind.REGEX, "a")),
    ],
)
def test_response_format(value: Any, spec: GrammarSpec | None) -> None:
    asked = response_format({"response_format": value})
    assert asked == (None if spec is None else AnswerFormat(spec, "response_format"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"guided_json": None, "guided_json_object": False}, None),
        ({"guided_json": '{"type": "null"}'}, AnswerFormat(NULL, "guided_json")),
        ({"guided_json_object": True}, AnswerFormat(OBJECT, "guided_json_object")),
        ({"guided_grammar": "start: A"}, AnswerFormat(GrammarSpec(GrammarKind.EBNF, "start: A"), "guided_grammar")),
        ({"structured_outputs": {"json": {"type": "null"}}}, AnswerFormat(NULL, "structured_outputs")),
        ({"structured_outputs": {"json": None, "json_object": True}}, AnswerFormat(OBJECT, "structured_outputs")),
    ],
)
def test_fields_of_vllm(body: dict[str, Any], expected: AnswerFormat | None) -> None:
    assert vllm_format(body) == expected


def test_a_choice_is_taken_literally() -> None:
    choices = ["a.b", "(c", "é|\n", ""]
    asked = vllm_format({"guided_choice": choices})
    assert asked is not None
    for text in [*choices, "axb", "c", "é"]:
        assert bool(re.fullmatch(asked.spec.source, text)) == (text in choices)
    rust_regex(asked.spec.source)


@pytest.mark.parametrize(
    ("constraint", "spec"),
    [
        (None, None),
        (("json", ""), OBJECT),
        (("json", '{"type": "null"}'), NULL),
        (("regex", "a"), GrammarSpec(GrammarKind.REGEX, "a")),
        (("tool_call", "[]"), None),
    ],
)
def test_what_the_prompt_layer_has_read(constraint: tuple[str, str] | None, spec: GrammarSpec | None) -> None:
    asked = chat_format(constraint, {})
    assert (None if asked is None else asked.spec) == spec


def test_several_formats_are_refused_and_the_last_one_is_named() -> None:
    with pytest.raises(InvalidFieldError, match="structured_outputs ask for 2 formats") as caught:
        vllm_format({"structured_outputs": {"json": {}, "regex": "a"}})
    assert caught.value.field == "structured_outputs"
    one = AnswerFormat(OBJECT, "response_format")
    assert only_one(None, one, None) == one
    assert only_one(None) is None


def test_a_format_and_ignore_eos_contradict_each_other() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        AnswerFormat(OBJECT, "response_format").applied_to(SamplingParams(ignore_eos=True))
    assert caught.value.field == "ignore_eos"
