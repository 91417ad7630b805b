"""Tool calls in the form that V4.1 writes them, as Lark.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="weather">
    <｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
    <｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

`｜DSML｜` is one special token, the only one that a grammar may speak. Texts stand as they are and end with `</` before
it; everything else is JSON. Parameters come in the order in which their schema declares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import GrammarError
from .json_schema import adapted_schema
from .spec import GrammarSpec

_UNSPEAKABLE = frozenset('"<>\n\r')
_PLAIN_STRING = frozenset({"type", "description", "title", "default", "examples", "enum", "const"})
"""A string that has no keyword but these can be written as it stands, and still be followed exactly."""


def tool_calls_source(tools: list[Any], *, opened: bool, content: GrammarSpec | None = None) -> str:
    """The source of a TOOL_CALLS spec.

    tools    as in `tools` of a chat request; those that are `strict` get arguments that their schema allows
    opened   the prompt has begun the block of calls: there must be one. Otherwise there may be
    content  a JSON kind: what the answer must look like if it calls nothing. None: any text, before calls too
    """
    schema = None if content is None else json.loads(content.source or '{"type":"object"}')
    return json.dumps({"tools": tools, "opened": opened, "content": schema}, ensure_ascii=False, separators=(",", ":"))


def lark_of_tool_calls(source: str, *, marker_id: int | None, json_rules: Mapping[str, Any]) -> str:
    """`marker_id`: of the special token. `json_rules`: how JSON is spelled. Raises GrammarError."""
    if marker_id is None:
        raise GrammarError("this model's tokenizer has no token to call tools with")
    asked = json.loads(source)
    writer = _Writer(f"<[{marker_id}]>", json_rules)
    return "\n".join(writer.lines(asked["tools"], opened=asked["opened"], content=asked["content"]))


class _Writer:
    def __init__(self, marker: str, json_rules: Mapping[str, Any]) -> None:
        self._marker = marker
        self._json_rules = json_rules

    def lines(self, tools: list[Any], *, opened: bool, content: Any) -> Iterator[str]:  # noqa: ANN401  JSON
        if opened:
            yield "start: calls"
        elif content is None:
            yield f'start: TEXT | TEXT_BEFORE_CALLS {self._marker} " calls>\\n" calls'
        else:
            yield f'start: content | "\\n\\n"? "<" {self._marker} " calls>\\n" calls'
            yield f"content: {self._json(content, lenient=False)}"
        yield f'calls: call+ "</" {self._marker} " calls>"'
        yield "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
        for index, tool in enumerate(tools):
            yield from self._call(f"call_{index}", tool["function"])
        yield "TEXT: /(?s:.*)/"
        yield "TEXT_BEFORE_CALLS: /(?s:.*)</"
        yield r"TEXT_AND_END: /(?s:.*)<\//"

    def _call(self, rule: str, function: Mapping[str, Any]) -> Iterator[str]:
        parameters: Mapping[str, Any] = function.get("parameters") or {}
        properties: Mapping[str, Any] = parameters.get("properties") or {}
        required: set[str] = set(parameters.get("required") or ())
        strict = bool(function.get("strict"))
        undeclared = required - set(properties)
        if undeclared:
            raise GrammarError(f"{_name(function['name'])} requires {min(undeclared)!r} without declaring it")
        names = {f"{rule}_{index}": name for index, name in enumerate(properties)}
        body = " ".join(f"{part}{'' if name in required else '?'}" for part, name in names.items())
        # A call without parameters has an empty line in their place.
        body = f'({body} | "\\n")' if body and not required else body or '"\\n"'
        yield f'{rule}: {self._opening("invoke", function["name"])} "\\n" {body} {self._closing("invoke")}'
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        for part, name in names.items():
            forms = self._values(properties[name], shared, strict=strict)
            yield f"{part}: " + " | ".join(
                f'{self._opening("parameter", name, string=string)} {value} {self._marker} " parameter>\\n"'
                for string, value in forms
            )

    def _values(self, schema: Any, shared: Mapping[str, Any], *, strict: bool) -> Iterator[tuple[str, str]]:  # noqa: ANN401  JSON
        """The forms that a value may have: whether it is a plain string, and its Lark up to the `</`."""
        is_string = isinstance(schema, dict) and schema.get("type") == "string"
        if is_string and (not strict or set(schema) <= _PLAIN_STRING):
            choices = [schema["const"]] if "const" in schema else schema.get("enum")
            if choices is None:
                yield "true", "TEXT_AND_END"
            else:
                texts = " | ".join(_literal(f"{choice}</") for choice in choices if isinstance(choice, str))
                if not texts:
                    raise GrammarError("an enum of a string parameter holds no string")
                yield "true", f"({texts})"
            return
        whole = {**schema, **shared} if isinstance(schema, dict) else schema
        yield "false", f'{self._json(whole, lenient=not strict)} "</"'

    def _json(self, schema: Any, *, lenient: bool) -> str:  # noqa: ANN401  JSON
        if not lenient:
            schema = adapted_schema(schema)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        guided = {**schema, "x-guidance": {**self._json_rules, "lenient": lenient}}
        return f"%json {json.dumps(guided, ensure_ascii=False)}"

    def _opening(self, tag: str, name: str, *, string: str | None = None) -> str:
        kind = "" if string is None else f' string="{string}"'
        return f'"<" {self._marker} ' + _literal(f' {tag} name="{_name(name)}"{kind}>')

    def _closing(self, tag: str) -> str:
        return f'"</" {self._marker} " {tag}>\\n"'


def _name(name: str) -> str:
    if not _UNSPEAKABLE.isdisjoint(name):
        raise GrammarError(f"the name {name!r} cannot be spoken in a call")
    return name


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
