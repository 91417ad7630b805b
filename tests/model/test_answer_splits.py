"""Answers cut at every place and said in bursts of every size are parsed as they are when they come at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import deepseek_recipe as recipe
import pytest

from tests.model.test_detokenizer_splits import BYTE_IDS
from tests.model.test_prompt import TOOLS, chat
from whalepod.model.prompt import ChatPrompt
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
THINKING = {"thinking": {"type": "enabled"}}
DSML = "<｜DSML｜"
TWO_CALLS = (
    f'I look. 🐋\n\n{DSML}tool_calls>\n{DSML}invoke name="look">\n{DSML}parameter name="at" string="true">鯨 & <sea>'
    f'</｜DSML｜parameter>\n</｜DSML｜invoke>\n{DSML}invoke name="look">\n{DSML}parameter name="at" string="false">'
    '{"deep": [1, 2.5, null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


def spelled(text: str) -> list[int]:
    return TOKENIZER.file.encode(text, add_special_tokens=False).ids


def cuts(text: str) -> Iterator[list[int]]:
    """The text as ids, none of which crosses some place: each between two bytes that are of no special token."""
    ids = spelled(text)
    for at, token_id in enumerate(ids):
        if token_id in TOKENIZER.special_ids:
            continue
        spoken = TOKENIZER.token_bytes(token_id)
        for cut in range(1, len(spoken)):
            yield [*ids[:at], *as_ids(spoken[:cut]), *as_ids(spoken[cut:]), *ids[at + 1 :]]
    yield [single for token_id in ids for single in _single(token_id)]


def as_ids(data: bytes) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in data]


def _single(token_id: int) -> list[int]:
    return [token_id] if token_id in TOKENIZER.special_ids else as_ids(TOKENIZER.token_bytes(token_id))


def chunks_of(prompt: ChatPrompt, ids: Sequence[int], burst: int) -> list[dict[str, Any]]:
    """What a client is streamed."""
    parser = prompt.parser(response_id="r", model="whale")
    usage = recipe.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
    made = list(parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))
    for start in range(0, len(ids), burst):
        if not parser.finished:
            made += parser.push(recipe.InferenceChunk.tokens(list(ids[start : start + burst])))
    if not parser.finished:
        made += parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    made += parser.finish()
    parser.close()
    return [json.loads(chunk.to_json()) for chunk in made]


def heard(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the client puts together from them."""
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for key in ("content", "reasoning_content"):
            said[key] += choice["delta"].get(key) or ""
        for call in choice["delta"].get("tool_calls") or []:
            if call["index"] == len(said["calls"]):
                said["calls"].append({"name": call["function"]["name"], "arguments": ""})
            said["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
        said["finish"] = choice["finish_reason"] or said["finish"]
    return said


def at_once(prompt: ChatPrompt, text: str) -> dict[str, Any]:
    ids = spelled(text)
    return heard(chunks_of(prompt, ids, len(ids)))


@pytest.mark.parametrize("burst", [1, 3])
def test_e5_calls_of_tools_are_the_same_wherever_their_text_is_cut(burst: int) -> None:
    prompt = chat(tools=TOOLS)
    meant = at_once(prompt, TWO_CALLS)
    assert [(call["name"], json.loads(call["arguments"])) for call in meant["calls"]] == [
        ("look", {"at": "鯨 & <sea>"}),
        ("look", {"at": {"deep": [1, 2.5, None]}}),
    ]
    assert (meant["content"].strip(), meant["finish"]) == ("I look. 🐋", "tool_calls")
    for ids in cuts(TWO_CALLS):
        assert heard(chunks_of(prompt, ids, burst)) == meant, ids


@pytest.mark.parametrize("burst", [1, 2, 5])
@pytest.mark.parametrize("stop", ["</th", "think>", "k", "\n\n", "Yes", "s.</"])
def test_e2_stop_strings_that_look_like_a_marker_hide_none(stop: str, burst: int) -> None:
    text = "I th so.</think>\n\nYes, I do."
    prompt = chat(stop=[stop], **THINKING)
    meant = at_once(prompt, text)
    assert meant["reasoning_content"] == "I th so.", "it hides in the marker, which is no text"
    assert "think>" not in meant["reasoning_content"] + meant["content"]
    for ids in cuts(text):
        assert heard(chunks_of(prompt, ids, burst)) == meant, ids


def test_e7_long_arguments_come_as_they_are_written() -> None:
    argument = "whale " * 3400  # 20 kB
    text = (
        f'{DSML}tool_calls>\n{DSML}invoke name="look">\n{DSML}parameter name="at" string="true">{argument}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    ids = spelled(text)
    chunks = chunks_of(chat(tools=TOOLS), ids, 1)
    deltas = [
        len(call["function"].get("arguments") or "")
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls") or []
    ]
    assert sum(deltas) >= len(argument)
    assert len(deltas) > len(ids) // 2, "a delta for nearly each token"
    assert max(deltas) < 100, "nothing is held back until the end"
    first = next(at for at, chunk in enumerate(chunks) if any("tool_calls" in c["delta"] for c in chunk["choices"]))
    assert first < 50


def one_call(inner: str, *, outer: str = "tool_calls", name: str = ' name="look"') -> str:
    return f"{DSML}{outer}>\n{DSML}invoke{name}>\n{inner}</｜DSML｜invoke>\n</｜DSML｜{outer}>"


AT_SEA = f'{DSML}parameter name="at" string="true">sea</｜DSML｜parameter>\n'
SEA = ("look", '{"at": "sea"}')
MALFORMED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "no start marker": (one_call(AT_SEA).removeprefix(f"{DSML}tool_calls>\n"), [SEA]),
    "another wrapper": (one_call(AT_SEA, outer="function_calls"), [SEA]),
    "never closed": (one_call(AT_SEA).partition("</")[0], [("look", '{"at": "sea')]),
    "no name": (one_call("", name=""), []),
    "text behind": (one_call(AT_SEA) + " and more", [SEA]),
    "no such tool": (one_call("", name=' name="swim"'), [("swim", "{}")]),
    "bad json": (one_call(AT_SEA.replace("true", "false").replace("sea", "{oops")), [("look", '{"at": {oops}')]),
    "marker alone": (f"Well {DSML}", []),
    "plain letters": (one_call(AT_SEA).replace("｜", "|"), []),
}
"""Each with the calls that a client is told of."""


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("burst", [1, 2, 7, 1000])
def test_e8_a_malformed_call_is_recovered_or_text_and_never_an_error(kind: str, burst: int) -> None:
    malformed, calls = MALFORMED[kind]
    said = heard(chunks_of(chat(tools=TOOLS), spelled("Before. " + malformed), burst))
    assert said["content"].startswith("Before. ")
    assert [(call["name"], call["arguments"]) for call in said["calls"]] == calls
    assert said["finish"] == ("tool_calls" if calls else "stop")
    assert (malformed in said["content"]) == (kind == "plain letters")
