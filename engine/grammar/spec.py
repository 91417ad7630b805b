"""What a request may ask its answer to look like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, Self

from .errors import GrammarError

SOURCE_BYTES_MAX = 256 << 10
"""Longest grammar, in UTF-8. Schemas of whole industry standards fit; what does not would fail the limits of
compiling anyway."""


class GrammarKind(Enum):
    REGEX = "regex"
    """A regular expression that the whole answer matches."""
    JSON_SCHEMA = "json_schema"
    EBNF = "ebnf"
    """llguidance's Lark, or GBNF."""
    JSON_OBJECT = "json_object"
    """Any JSON object; has no source."""
    TOOL_CALLS = "tool_calls"
    """Calls of tools in the model's own form; the source is that of `tool_calls.py`."""


_SO_KINDS: Mapping[str, GrammarKind] = {
    **{kind.value: kind for kind in GrammarKind if kind is not GrammarKind.TOOL_CALLS},
    "json": GrammarKind.JSON_SCHEMA,
}


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Two specs that are equal share one compiled grammar. Well-formed, but not yet known to compile."""

    kind: GrammarKind
    source: str = ""

    @classmethod
    def create(cls, kind: GrammarKind, source: object = None) -> Self:
        """`source`: text, or, for a JSON schema, also the decoded schema. Raises GrammarError.

        A schema's keys keep their order: it is the order in which an answer has them.
        """
        if kind is GrammarKind.JSON_OBJECT:
            if source not in (None, "", {}):
                raise GrammarError("json_object takes no schema; use json_schema")
            return cls(kind)
        if kind is GrammarKind.JSON_SCHEMA:
            source = _canonical_schema(source)
        if not isinstance(source, str):
            raise GrammarError(f"{kind.value} must be given as text, not {type(source).__name__}")
        _check_text(source)
        return cls(kind, source)

    @classmethod
    def from_so_args(cls, so_args: object) -> Self:
        """From `so_args` of the offline interface: {"schema_type": …, "schema": …}. Raises GrammarError."""
        if not isinstance(so_args, Mapping):
            raise GrammarError(f"so_args must be a mapping, not {type(so_args).__name__}")
        unknown = [str(key) for key in so_args if key not in ("schema_type", "schema")]
        if unknown:
            raise GrammarError(f"so_args knows schema_type and schema, not {', '.join(sorted(unknown))}")
        kind = so_args.get("schema_type")
        if not isinstance(kind, str) or kind not in _SO_KINDS:
            raise GrammarError(f"schema_type must be one of {', '.join(_SO_KINDS)}, not {kind!r}")
        return cls.create(_SO_KINDS[kind], so_args.get("schema"))


def _canonical_schema(schema: object) -> str:
    """Compact JSON of a schema. Raises GrammarError."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema, parse_constant=_refuse_constant)
        if schema is False:
            raise GrammarError("nothing satisfies the JSON schema false")
        if schema is True:
            return "{}"
        if not isinstance(schema, dict):
            raise GrammarError(f"a JSON schema must be an object or a boolean, not {type(schema).__name__}")
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the JSON schema cannot be read: {error}") from None


def _refuse_constant(spelling: str) -> NoReturn:
    raise ValueError(f"{spelling} is no JSON")


def _check_text(source: str) -> None:
    try:
        length = len(source.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"the text is not valid Unicode: {error.reason}") from None
    if length > SOURCE_BYTES_MAX:
        raise GrammarError(f"a grammar may have {SOURCE_BYTES_MAX} bytes at most, not {length}")
