"""Calls of tools, spoken by a random model and read back by the released parser."""

from __future__ import annotations

import json
from typing import Any

import deepseek_recipe as recipe
import jsonschema
import pytest

from tests.engine.grammar.random_model import answer
from tests.engine.grammar.shipped_vocabulary import EOS_ID, compiled, tokenizer
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.matcher import CompiledGrammar
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.grammar.tool_calls import tool_calls_source
from whalepod.model.config import ModelConfig
from whalepod.model.prompt import ChatPrompt, PromptEncoder
from whalepod.model.tiny_checkpoint import tiny_config_json


def tool(name: str, properties: dict[str, Any], *, strict: bool = True, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


BOUNDED = [
    tool(
        "weather",
        {
            "city": {"type": "string", "enum": ["Köln", "a</b>", 'quo"ted']},
            "days": {"type": "integer", "minimum": 0, "maximum": 14},
            "near": {"type": "array", "items": {"$ref": "#/definitions/place"}, "maxItems": 1},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        required=["city", "days"],
        definitions={"place": {"type": "string", "pattern": "^[A-Z]{2}$"}},
    ),
    tool("wait", {}),
    tool("stop", {"why": {"const": "done"}, "hard": {"type": "boolean"}}),
]
FREE = [tool("say", {"text": {"type": "string"}}, strict=False, required=["text"])]


def calls(tools: list[Any], *, opened: bool = True, content: GrammarSpec | None = None) -> CompiledGrammar:
    return compiled(GrammarKind.TOOL_CALLS, tool_calls_source(tools, opened=opened, content=content))


def ids_of(text: str) -> list[int]:
    """Tokens of a text in which special spellings are special tokens."""
    return tokenizer().file.encode(text, add_special_tokens=False).ids


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    ids = ids_of(text)
    matcher = grammar.matcher()
    return matcher.accept_all(ids) == len(ids) and matcher.accepting


def prompt_with(tools: list[Any], *, choice: str) -> ChatPrompt:
    encoder = PromptEncoder(tokenizer(), ModelConfig.from_json(tiny_config_json(tokenizer())), served_names=["m"])
    # The prompt layer holds strict schemas to rules of its own, which are not what is tested here.
    lax = [{**one, "function": {**one["function"], "strict": False}} for one in tools]
    body = {
        "messages": [{"role": "user", "content": "Go"}],
        "tools": lax,
        "tool_choice": choice,
        "thinking": {"type": "disabled"},
    }
    return encoder.chat(body, context_tokens=4096)


def read_back(prompt: ChatPrompt, ids: list[int]) -> dict[str, Any]:
    """The message that the released parser makes of an answer."""
    parser = prompt.parser(response_id="x", model="m")
    response = recipe.ChatCompletionResponse("x", "m", 0, len(prompt.prompt_ids), 0)
    usage = recipe.PromptUsage(prompt_tokens=len(prompt.prompt_ids), prompt_cache_hit_tokens=0)
    chunks = list(parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))
    chunks += parser.push(recipe.InferenceChunk.tokens(ids))
    chunks += parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    for chunk in [*chunks, *parser.finish()]:
        assert isinstance(chunk, recipe.ChatCompletionChunk)
        response.accumulate(chunk)
    return json.loads(response.to_json())["choices"][0]["message"]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_called_is_declared_and_its_arguments_are_valid(seed: int) -> None:
    said = answer(calls(BOUNDED), seed=seed, greedy=seed % 2 == 0, max_tokens=600)
    assert said.stopped
    message = read_back(prompt_with(BOUNDED, choice="required"), said.ids)
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in BOUNDED}
    assert message["tool_calls"]
    for call in message["tool_calls"]:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


def test_a_text_parameter_stands_as_it_is_and_may_hold_markup() -> None:
    text = 'Say "</b>" & <i>\n'
    spoken = (
        f'<｜DSML｜ invoke name="say">\n<｜DSML｜ parameter name="text" string="true">{text}</｜DSML｜ parameter>\n'
    )
    spoken += "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    assert accepts(calls(FREE), spoken)
    message = read_back(prompt_with(FREE, choice="required"), ids_of(spoken))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": text}


WAIT = '<｜DSML｜ invoke name="wait">\n\n</｜DSML｜ invoke>\n'
END = "</｜DSML｜ calls>"
BLOCK = f"<｜DSML｜ calls>\n{WAIT}{END}"


@pytest.mark.parametrize(
    ("spoken", "holds"),
    [
        (WAIT + END, True),
        (WAIT + WAIT + END, True),
        (END, False),
        (WAIT.replace("wait", "other") + END, False),
        (WAIT.replace("wait", "weather") + END, False),
        ("Let me think.", False),
    ],
)
def test_where_a_call_must_come_nothing_else_does(spoken: str, holds: bool) -> None:
    assert accepts(calls(BOUNDED), spoken) is holds


def test_where_a_call_may_come_text_may_too_and_before_it() -> None:
    grammar = calls(BOUNDED, opened=False)
    for spoken in ["", "No <b>calls</b> & no <｜DSML in plain", f"Wait.\n\n{BLOCK}", BLOCK]:
        assert accepts(grammar, spoken), spoken
    assert not accepts(grammar, f"{BLOCK} and more")
    message = read_back(prompt_with(BOUNDED, choice="auto"), ids_of(f"Wait.\n\n{BLOCK}"))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["wait"]


def test_an_answer_that_calls_nothing_has_the_form_that_was_asked_for() -> None:
    schema = GrammarSpec.create(GrammarKind.JSON_SCHEMA, {"type": "integer"})
    grammar = calls(BOUNDED, opened=False, content=schema)
    assert accepts(grammar, "42")
    assert accepts(grammar, f"\n\n{BLOCK}")
    assert not accepts(grammar, "words")
    assert accepts(calls(BOUNDED, opened=False, content=GrammarSpec(GrammarKind.JSON_OBJECT)), '{"a": 1}')


def test_only_grammars_of_calls_speak_the_marker_and_none_speaks_another_special_token() -> None:
    marker = tokenizer().token_id("｜DSML｜")
    assert marker is not None
    assert not compiled(GrammarKind.EBNF, f"start: <[{marker}]>").matcher().accept(marker)
    matcher = calls(BOUNDED).matcher()
    assert matcher.accept_all([*tokenizer().encode("<"), marker]) == 2
    assert not any(matcher.accept(special) for special in tokenizer().special_ids - {EOS_ID})


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([tool('na"me', {})], "cannot be spoken"),
        ([tool("t", {"a>b": {}})], "cannot be spoken"),
        ([tool("t", {}, required=["a"])], "requires 'a' without declaring it"),
        ([tool("t", {"a": {"type": "string", "enum": [1]}})], "holds no string"),
        ([tool("t", {"a": {"type": "integer", "not": {}}})], "not"),
        ([tool("t", {"a": {"type": "string", "pattern": "(?=a)"}})], "look-ahead"),
    ],
)
def test_tools_that_cannot_be_followed_are_refused(tools: list[Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        calls(tools)


def test_a_tool_that_is_not_strict_promises_its_parameters_names_only() -> None:
    grammar = calls([tool("t", {"a": {"type": "integer", "not": {"const": 3}}}, strict=False)])
    spoken = '<｜DSML｜ invoke name="t">\n<｜DSML｜ parameter name="a" string="false">3</｜DSML｜ parameter>\n'
    assert accepts(grammar, spoken + "</｜DSML｜ invoke>\n</｜DSML｜ calls>")
