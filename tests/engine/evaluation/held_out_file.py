"""A small file of held-out text, in the form of the corpus."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from whalepod.engine.evaluation.held_out import HELD_OUT_FILE, SERVED_NAME
from whalepod.model.config import ModelConfig
from whalepod.model.prompt import PromptEncoder
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json

TOKENIZER = shipped_tokenizer()
CONFIG = ModelConfig.from_json(tiny_config_json(TOKENIZER))
ENCODER = PromptEncoder(TOKENIZER, CONFIG, served_names=(SERVED_NAME,))
OFF = {"thinking": {"type": "disabled"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOL = {"type": "function", "function": {"name": "get_age", "description": "Get an age.", "parameters": SCHEMA}}
ASKED = {"role": "user", "content": "How old is Tim?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "get_age", "arguments": '{"age": 7}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "7"}


@cache
def words(count: int, *, seed: int = 0) -> str:
    rng = Random(seed)
    return " ".join(rng.choices(("the", "cat", "sat", "on", "a", "red", "hat", "and", "saw", "big", "dogs"), k=count))


def text_line(kind: str, count: int, *, seed: int = 0) -> dict[str, Any]:
    ids = [*ENCODER.completion(words(count, seed=seed), context_tokens=8192), CONFIG.eos_token_id]
    return {"kind": kind, "ids": ids, "targets": [[1, len(ids)]]}


def chat_line(kind: str, messages: Sequence[Mapping[str, Any]], answer: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": list(messages), **OFF, **fields}
    prompt = list(ENCODER.chat(body, context_tokens=8192).prompt_ids)
    ids = [*prompt, *TOKENIZER.encode(answer), CONFIG.eos_token_id]
    return {"kind": kind, "ids": ids, "targets": [[len(prompt), len(ids)]], "body": body, "answer": answer}


def recall_line(fact: str, question: str, answer: str, *, words_behind: int) -> dict[str, Any]:
    told = f"{words(5)}\n{fact}\n{words(words_behind)}\n{question}"
    return chat_line("recall", [{"role": "user", "content": told}], answer)


def json_line() -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    return chat_line("json", [ASKED], '{"age": 7}', response_format=form)


def tool_line() -> dict[str, Any]:
    return chat_line("tool", [ASKED, CALL, RESULT], "Tim is 7.", tools=[TOOL])


def every_kind() -> list[dict[str, Any]]:
    """Two or three lines of each."""
    return [
        *(text_line("story", 150, seed=seed) for seed in range(3)),
        *(chat_line("chat", [{"role": "user", "content": words(6, seed=seed)}], words(9)) for seed in range(3)),
        recall_line("Tim lives in Rome now.", "Where does Tim live?", "Tim lives in Rome.", words_behind=60),
        recall_line("Mia lives in Oslo now.", "Where does Mia live?", "Mia lives in Oslo.", words_behind=10),
        json_line(),
        tool_line(),
    ]


def write_held_out(directory: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path = directory / HELD_OUT_FILE
    path.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path
