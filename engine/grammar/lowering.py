"""A spec in the words of llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher

from .errors import GrammarError
from .gbnf import is_gbnf, lark_of_gbnf
from .json_schema import adapt
from .python_regex import rust_regex
from .spec import GrammarKind, GrammarSpec
from .tool_calls import lark_of_tool_calls

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Applied last, so that a schema cannot change them through `x-guidance`. Between tokens of JSON there may be one space,
# or one new line and its indentation: with any whitespace, a model may fill its answer with it. In free strings every
# character has one spelling, so that an undeclared key cannot be a declared one in disguise.
_JSON_RULES: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}


def lower(spec: GrammarSpec, *, marker_id: int | None = None) -> str:
    """What `LLMatcher` takes. `marker_id`: of the special token that calls tools.

    Raises GrammarError on what our translations find; llguidance finds the rest.
    """
    match spec.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(rust_regex(spec.source))
        case GrammarKind.JSON_SCHEMA:
            return _json(adapt(spec.source))
        case GrammarKind.JSON_OBJECT:
            return _json('{"type":"object"}')
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(lark_of_gbnf(spec.source) if is_gbnf(spec.source) else spec.source)
        case GrammarKind.TOOL_CALLS:
            lark = lark_of_tool_calls(spec.source, marker_id=marker_id, json_rules={**_JSON_RULES})
            return LLMatcher.grammar_from_lark(lark)


def _json(schema: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_RULES)
    except ValueError as error:
        raise GrammarError(f"invalid JSON schema: {error}") from None
