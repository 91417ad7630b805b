"""A JSON schema made safe for llguidance: what it would follow more loosely than a validator judges is put in words
that both understand, or refused. What it does not know at all it refuses itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeAlias

from .errors import GrammarError
from .python_regex import rust_regex

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | int | bool | None"

_DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXACT_MAX = 2**53
"""Bounds are kept as float64."""
_UNSPOKEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that no generated string has: they would need an escape by number, which would spell others too."""


def adapt(source: str) -> str:
    """The schema to give to llguidance, as JSON. Raises GrammarError."""
    return json.dumps(adapted_schema(json.loads(source)), ensure_ascii=False, separators=(",", ":"))


def adapted_schema(schema: Json) -> Json:
    """The same of a decoded schema."""
    try:
        return _adapted(schema)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None


def _adapted(schema: Json) -> Json:
    if isinstance(schema, list):
        return [_adapted(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _check_bounds(schema)
    _check_counts(schema)
    for value in _values_of(
        [schema.get("const"), schema.get("enum"), schema.get("properties"), schema.get("required")]
    ):
        _check_value(value)
    return {key: _adapted_value(key, value) for key, value in schema.items()}


def _adapted_value(key: str, value: Json) -> Json:
    if key in _DATA:
        return value
    if key == "pattern" and isinstance(value, str):
        return rust_regex(value, search=True)
    if key in _NAMED and isinstance(value, dict):
        named = {name: _adapted(inner) for name, inner in value.items()}
        if key == "patternProperties":
            return {rust_regex(pattern, search=True): inner for pattern, inner in named.items()}
        return named
    return _adapted(value)


def _check_bounds(schema: Mapping[str, Json]) -> None:
    for key in _BOUNDS:
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > _EXACT_MAX:
            raise GrammarError(f"{key} must be within ±2^53 to be followed exactly, not {bound}")


def _check_value(value: int | str) -> None:
    if isinstance(value, str):
        found = _UNSPOKEN.search(value)
        if found is not None:
            raise GrammarError(f"the character U+{ord(found.group()):04X} cannot be generated")
    elif not -(2**63) <= value < 2**64:
        raise GrammarError(f"the number {value} is too large to be followed exactly")


def _values_of(value: Json) -> list[int | str]:
    """Every integer and every text in it, keys too."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [inner for item in value for inner in _values_of(item)]
    return [value] if isinstance(value, int | str) else []


def _check_counts(schema: Mapping[str, Json]) -> None:
    """Two free keys may be equal, and then count once."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len({str(name) for name in required}) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > known + 1:
        raise GrammarError("minProperties can exceed the number of required properties by one at most")
