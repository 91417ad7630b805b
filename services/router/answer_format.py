"""What a client wants its answer to look like, in each of the ways in which it may say so.

response_format, tool_choice, strict tools (OpenAI) │ structured_outputs, guided_* (vLLM) ──▶ AnswerFormat ──▶ grammar
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalepod.core.errors import InvalidFieldError
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.grammar.tool_calls import tool_calls_source
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.protocols import CHAT, MESSAGES, RESPONSES, Protocol, messages_schema

RESPONSE_FORMAT = "response_format"
STRUCTURED_OUTPUTS = "structured_outputs"
GUIDED_PREFIX = "guided_"
CHOICES_MAX = 1000


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """`field` of the request asked for it, and is named if it cannot be had."""

    spec: GrammarSpec
    field: str

    @classmethod
    def create(cls, field: str, kind: GrammarKind, source: object = None) -> AnswerFormat:
        """Raises InvalidFieldError on a source that is none of its kind."""
        try:
            return cls(GrammarSpec.create(kind, source), field)
        except GrammarError as error:
            raise InvalidFieldError(field, f"{field}: {error}") from error

    def applied_to(self, sampling: SamplingParams, *, starts_after: int | None = None) -> SamplingParams:
        """Raises InvalidFieldError on fields that contradict it."""
        return replace(sampling, grammar=self.spec, grammar_starts_after=starts_after)


def vllm_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    """What `structured_outputs` or a `guided_…` field asks for. Raises InvalidFieldError, also if there are two."""
    asked = [(f"{GUIDED_PREFIX}{name}", name, body.get(f"{GUIDED_PREFIX}{name}")) for name in _WAYS]
    structured = body.get(STRUCTURED_OUTPUTS)
    if structured is not None:
        if not isinstance(structured, Mapping) or not set(structured) <= set(_WAYS):
            raise InvalidFieldError(STRUCTURED_OUTPUTS, f"{STRUCTURED_OUTPUTS} must be an object of {', '.join(_WAYS)}")
        asked += [(STRUCTURED_OUTPUTS, name, value) for name, value in structured.items()]
    formats = [_WAYS[name](field, value) for field, name, value in asked if value is not None and value is not False]
    return only_one(*formats)


def response_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    """What `response_format` asks for, where the prompt layer does not read it. Raises InvalidFieldError."""
    value = body.get(RESPONSE_FORMAT)
    if value is None:
        return None
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return AnswerFormat.create(RESPONSE_FORMAT, GrammarKind.JSON_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return AnswerFormat.create(RESPONSE_FORMAT, GrammarKind.JSON_SCHEMA, schema)
        case {"type": "regex", "regex": pattern}:
            return AnswerFormat.create(RESPONSE_FORMAT, GrammarKind.REGEX, pattern)
        case _:
            raise InvalidFieldError(
                RESPONSE_FORMAT,
                f"{RESPONSE_FORMAT} must be of type text, json_object, json_schema (with json_schema.schema) or regex",
            )


def chat_format(
    constraint: tuple[str, str] | None, body: Mapping[str, Any], protocol: Protocol = CHAT
) -> AnswerFormat | None:
    """What a conversation's request asks for. `constraint`: the kind and schema that the prompt layer has read in it,
    which is of the tools if there are any. Raises InvalidFieldError."""
    field = "text" if protocol is RESPONSES else RESPONSE_FORMAT
    match constraint:
        case ("json", ""):
            asked = AnswerFormat.create(field, GrammarKind.JSON_OBJECT)
        case ("json", schema):
            asked = AnswerFormat.create(field, GrammarKind.JSON_SCHEMA, schema)
        case ("regex", pattern):
            asked = AnswerFormat.create(field, GrammarKind.REGEX, pattern)
        case ("tool_call" | "tool_call_required" as kind, tools):
            otherwise = only_one(_FORMS[protocol.name](body), vllm_format(body))
            return _tool_format(json.loads(tools), opened=kind == "tool_call_required", otherwise=otherwise)
        case _:
            asked = _messages_format(body) if protocol is MESSAGES else None
    return only_one(asked, vllm_format(body))


def _responses_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    match body.get("text"):
        case {"format": {"type": "json_object"}}:
            return AnswerFormat.create("text", GrammarKind.JSON_OBJECT)
        case {"format": {"type": "json_schema", "schema": schema}}:
            return AnswerFormat.create("text", GrammarKind.JSON_SCHEMA, schema)
        case _:
            return None


def _messages_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    schema = messages_schema(body)
    return None if schema is None else AnswerFormat.create("output_config", GrammarKind.JSON_SCHEMA, schema)


def _tool_format(tools: list[Any], *, opened: bool, otherwise: AnswerFormat | None) -> AnswerFormat | None:
    """`opened`: a call must come. `otherwise`: what an answer without a call looks like. None: nothing was promised."""
    if opened:
        return AnswerFormat.create("tool_choice", GrammarKind.TOOL_CALLS, tool_calls_source(tools, opened=True))
    strict = any(tool["function"].get("strict") for tool in tools)
    if otherwise is None:
        source = tool_calls_source(tools, opened=False)
        return AnswerFormat.create("tools", GrammarKind.TOOL_CALLS, source) if strict else None
    if otherwise.spec.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        raise InvalidFieldError(otherwise.field, f"{otherwise.field}: beside tools, only JSON can be asked for")
    source = tool_calls_source(tools, opened=False, content=otherwise.spec)
    return AnswerFormat.create(otherwise.field, GrammarKind.TOOL_CALLS, source)


def only_one(*formats: AnswerFormat | None) -> AnswerFormat | None:
    """The one that was asked for. Raises InvalidFieldError if there are several: nobody said which one counts."""
    asked = [one for one in formats if one is not None]
    if len(asked) > 1:
        fields = " and ".join(dict.fromkeys(one.field for one in asked))
        raise InvalidFieldError(asked[-1].field, f"{fields} ask for {len(asked)} formats, but an answer has one")
    return asked[0] if asked else None


def _choice(field: str, value: object) -> AnswerFormat:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise InvalidFieldError(field, f"{field}: choice must be a list of strings")
    if not 0 < len(value) <= CHOICES_MAX:
        raise InvalidFieldError(field, f"{field}: choice must hold 1 to {CHOICES_MAX} strings, not {len(value)}")
    return AnswerFormat.create(field, GrammarKind.REGEX, "|".join(f"(?:{re.escape(one)})" for one in value))


def _json_object(field: str, value: object) -> AnswerFormat:
    if value is not True:
        raise InvalidFieldError(field, f"{field}: json_object must be true or false")
    return AnswerFormat.create(field, GrammarKind.JSON_OBJECT)


_WAYS: Mapping[str, Callable[[str, object], AnswerFormat]] = {
    "json": lambda field, value: AnswerFormat.create(field, GrammarKind.JSON_SCHEMA, value),
    "regex": lambda field, value: AnswerFormat.create(field, GrammarKind.REGEX, value),
    "choice": _choice,
    "grammar": lambda field, value: AnswerFormat.create(field, GrammarKind.EBNF, value),
    "json_object": _json_object,
}
"""vLLM's names for the ways to ask."""

_FORMS: Mapping[str, Callable[[Mapping[str, Any]], AnswerFormat | None]] = {
    "chat": response_format,
    "responses": _responses_format,
    "messages": _messages_format,
}
"""What each protocol's own field asks for, where the prompt layer has read the tools instead."""
