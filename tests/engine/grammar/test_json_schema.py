"""What llguidance would follow more loosely than a validator judges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.grammar.schemas import Schema
from tests.engine.grammar.shipped_vocabulary import accepts, compiled
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.json_schema import adapt
from whalepod.engine.grammar.spec import GrammarKind


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"minimum": 2**53 + 2}, "minimum must be within"),
        ({"items": {"exclusiveMaximum": -1e300}}, "exclusiveMaximum must be within"),
        ({"enum": [1, 2**64]}, "18446744073709551616 is too large"),
        ({"const": {"a": [-(2**63) - 1]}}, "too large"),
        ({"type": "object", "minProperties": 2}, "minProperties can exceed"),
        ({"properties": {"x": {"enum": ["a\u0001"]}}}, "U+0001 cannot be generated"),
        ({"properties": {"\u007f": {}}}, "U+007F cannot be generated"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-ahead is not supported"),
        ({"patternProperties": {"\\bx": {}}}, "word boundaries"),
        ({"not": {"type": "null"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "made-up"}, "Unknown format"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "sting"}, "Invalid type: sting"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented"),
    ],
)
def test_what_cannot_be_followed_exactly_is_refused(schema: Schema, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(GrammarKind.JSON_SCHEMA, schema)
    assert reason in str(caught.value)


def test_an_undeclared_key_cannot_be_a_declared_one_in_disguise() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    grammar = compiled(GrammarKind.JSON_SCHEMA, schema)
    assert accepts(grammar, '{"a":1,"b":true}')
    for text in ['{"a":true}', '{"a":1,"a":true}', '{"\\u0061":true}', '{"a":1,"\\u0061":true}']:
        assert not accepts(grammar, text), text


def test_data_and_names_that_look_like_keywords_are_left_alone() -> None:
    schema: dict[str, Any] = {
        "properties": {"pattern": {"const": {"pattern": "\\d"}}, "minProperties": {"default": {"minimum": 1e300}}},
        "$defs": {"enum": {"type": "string", "pattern": "\\d"}},
    }
    adapted = json.loads(adapt(json.dumps(schema)))
    assert adapted["properties"] == schema["properties"]
    assert adapted["$defs"]["enum"]["pattern"] == "[0-9]"


def test_any_json_object_is_an_object() -> None:
    grammar = compiled(GrammarKind.JSON_OBJECT)
    assert accepts(grammar, '{"a": [1, {"b": null}], "c": "é"}')
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('{"a":[1,2]}', True),
        ('{"a": [1, 2]}', True),
        ('{\n  "a": [\n    1\n  ]\n}', True),
        ('{  "a":[]}', False),
        ('{"a":[]}\n', False),
        (' {"a":[]}', False),
        ("{\n" + " " * 33 + '"a":[]}', False),
    ],
)
def test_whitespace_is_what_people_indent_with_and_never_without_end(text: str, holds: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert accepts(compiled(GrammarKind.JSON_SCHEMA, schema), text) is holds
