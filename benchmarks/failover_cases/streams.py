"""Streams of every kind, and what their clients see of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from whalepod.core.clock import SYSTEM_CLOCK

PROMPT = "The whale swam on, and the sea was quiet about it. "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 30, "pattern": "^[a-z]*$"},
        "kind": {"type": "string", "enum": ["blue", "grey", "white"]},
        "seen": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "minItems": 8,
            "maxItems": 9,
        },
    },
    "required": ["name", "kind", "seen"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Asked:
    kind: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What one client saw. `times_s`: when each event that carried output came."""

    parts: list[str] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    ended: bool = False
    times_s: list[float] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return self.error is not None or not self.ended or self.finish is None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def pause_s(self, at_s: float) -> float | None:
        """The longest gap that a moment lies in. None: the stream had not begun, or was over."""
        gaps = zip(self.times_s, self.times_s[1:], strict=False)
        return next((after - before for before, after in gaps if before <= at_s < after), None)


def streams(count: int, *, tokens: int) -> list[Asked]:
    """In turn: greedy, drawn with a seed, by a JSON schema, a tool call."""
    return [_KINDS[index % len(_KINDS)](index, tokens) for index in range(count)]


async def run_all(url: str, asked: Sequence[Asked], *, on_event: Callable[[], None] = lambda: None) -> list[Seen]:
    """All at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=180, trust_env=False, limits=limits) as http:
        return list(await asyncio.gather(*(_run(http, one, on_event) for one in asked)))


async def _run(http: httpx.AsyncClient, asked: Asked, on_event: Callable[[], None]) -> Seen:
    seen = Seen()
    try:
        async with http.stream("POST", asked.path, json={**asked.body, "stream": True}) as response:
            if response.status_code != 200:
                seen.error = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                return seen
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    seen.ended = True
                elif data:
                    _take(seen, json.loads(data))
                    on_event()
    except httpx.HTTPError as failure:
        seen.error = repr(failure)
    return seen


def _take(seen: Seen, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        seen.error = json.dumps(chunk["error"])
        return
    for choice in chunk["choices"]:
        delta = choice.get("delta") or {}
        parts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content")]
        for call in delta.get("tool_calls") or ():
            parts += [call["function"].get("name"), call["function"].get("arguments")]
        new = [part for part in parts if part]
        if new:
            seen.parts += new
            seen.times_s.append(SYSTEM_CLOCK.monotonic_s())
        seen.finish = choice.get("finish_reason") or seen.finish


def _completion(index: int, tokens: int, **fields: object) -> Asked:
    body: dict[str, Any] = {
        "prompt": f"{index}: {PROMPT * 12}",
        "max_tokens": tokens,
        "ignore_eos": True,
        "fidelity": "exact",
        **fields,
    }
    return Asked("greedy" if fields.get("temperature") == 0 else "seeded", "/v1/completions", body)


def _chat(kind: str, index: int, **fields: object) -> Asked:
    messages = [{"role": "user", "content": f"{index}: {PROMPT * 8} Answer in json."}]
    body: dict[str, Any] = {
        "messages": messages,
        "thinking": {"type": "disabled"},
        "fidelity": "exact",
        "max_tokens": 400,
    }
    return Asked(kind, "/v1/chat/completions", {**body, **fields})


def _json(index: int, _: int) -> Asked:
    form = {"type": "json_schema", "json_schema": {"name": "whale", "strict": True, "schema": SCHEMA}}
    return _chat("json", index, seed=index, response_format=form)


def _tool(index: int, _: int) -> Asked:
    tool = {"type": "function", "function": {"name": "note_whale", "parameters": SCHEMA, "strict": True}}
    return _chat("tool", index, seed=index, tools=[tool], tool_choice="required")


_KINDS: tuple[Callable[[int, int], Asked], ...] = (
    lambda index, tokens: _completion(index, tokens, temperature=0),
    lambda index, tokens: _completion(index, tokens, temperature=1, seed=index),
    _json,
    _tool,
)
