"""What may be asked for, and how what may not is refused."""

from __future__ import annotations

from typing import Any

import pytest

from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.spec import SOURCE_BYTES_MAX, GrammarKind, GrammarSpec

NULL = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')


@pytest.mark.parametrize(
    ("so_args", "spec"),
    [
        ({"schema_type": "regex", "schema": "a+"}, GrammarSpec(GrammarKind.REGEX, "a+")),
        ({"schema_type": "ebnf", "schema": 'root ::= "a"'}, GrammarSpec(GrammarKind.EBNF, 'root ::= "a"')),
        ({"schema_type": "json_schema", "schema": {"type": "null"}}, NULL),
        ({"schema_type": "json", "schema": '{ "type" : "null" }'}, NULL),
        ({"schema_type": "json_schema", "schema": True}, GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")),
        ({"schema_type": "json_object", "schema": None}, GrammarSpec(GrammarKind.JSON_OBJECT)),
        ({"schema_type": "json_object"}, GrammarSpec(GrammarKind.JSON_OBJECT)),
    ],
)  # fmt: skip
def test_so_args_name_a_kind_and_a_schema(so_args: dict[str, Any], spec: GrammarSpec) -> None:
    assert GrammarSpec.from_so_args(so_args) == spec


@pytest.mark.parametrize(
    ("so_args", "reason"),
    [
        ("regex", "must be a mapping, not str"),
        ({"schema": "a"}, "schema_type must be one of regex, json_schema, ebnf, json_object, json, not None"),
        ({"schema_type": "xml", "schema": "a"}, "not 'xml'"),
        ({"schema_type": ["regex"], "schema": "a"}, "schema_type must be one of"),
        ({"schema_type": "regex", "schema": "a", "strict": True}, "not strict"),
        ({"schema_type": "regex"}, "regex must be given as text, not NoneType"),
        ({"schema_type": "regex", "schema": 5}, "not int"),
        ({"schema_type": "ebnf", "schema": {}}, "not dict"),
        ({"schema_type": "json_schema", "schema": "{"}, "the JSON schema cannot be read"),
        ({"schema_type": "json_schema", "schema": "NaN"}, "NaN is no JSON"),
        ({"schema_type": "json_schema", "schema": {"minimum": float("inf")}}, "cannot be read"),
        ({"schema_type": "json_schema", "schema": {"const": {1, 2}}}, "cannot be read"),
        ({"schema_type": "json_schema", "schema": [1]}, "must be an object or a boolean, not list"),
        ({"schema_type": "json_schema", "schema": False}, "nothing satisfies"),
        ({"schema_type": "json_schema", "schema": "[" * 100_000}, "nested too deeply"),
        ({"schema_type": "json_object", "schema": {"type": "object"}}, "takes no schema"),
        ({"schema_type": "regex", "schema": "\ud800"}, "not valid Unicode"),
        ({"schema_type": "regex", "schema": "é" * SOURCE_BYTES_MAX}, f"{SOURCE_BYTES_MAX} bytes at most"),
    ],
)
def test_bad_so_args_are_refused_with_a_reason(so_args: Any, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        GrammarSpec.from_so_args(so_args)
    assert reason in str(caught.value)


def test_a_schema_keeps_the_order_of_its_keys_and_loses_its_spaces() -> None:
    loose = GrammarSpec.create(GrammarKind.JSON_SCHEMA, '{"properties": {"b": {},  "a": {}}}')
    assert loose.source == '{"properties":{"b":{},"a":{}}}'
    assert loose != GrammarSpec.create(GrammarKind.JSON_SCHEMA, {"properties": {"a": {}, "b": {}}})
