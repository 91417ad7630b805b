"""A closed loop of streamed completions, and what their clients see."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.progress import ProgressReport


@dataclass(frozen=True, slots=True)
class LoadOptions:
    requests: int = 64
    concurrency: int = 8
    prompt_tokens: int = 128
    """Of each prompt: random ids, so that no two share a prefix."""
    answer_tokens: int = 32
    seed: int = 0
    ids_from: int = 300
    ids_to: int = 4000


@dataclass(slots=True)
class Seen:
    """One answer as its client saw it. Times since the request was sent, in seconds."""

    first_token_s: float = 0.0
    end_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


async def run_load(
    url: str, options: LoadOptions, *, console: Console, clock: Clock = SYSTEM_CLOCK
) -> tuple[list[Seen], float]:
    """What every client saw, and how long all of it took."""
    draw = random.Random(options.seed)
    prompts = [
        [draw.randrange(options.ids_from, options.ids_to) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests)
    ]
    queue = iter(prompts)
    seen: list[Seen] = []
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:

        async def work() -> None:
            for prompt in queue:
                seen.append(await _ask(client, prompt, options, clock))
                report.advance()

        started_s = clock.monotonic_s()
        with ProgressReport(
            "load", unit="requests", total=options.requests, say=console.print, console=console, clock=clock
        ) as report:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.concurrency):
                    group.create_task(work())
        return seen, clock.monotonic_s() - started_s


async def _ask(client: httpx.AsyncClient, prompt: Sequence[int], options: LoadOptions, clock: Clock) -> Seen:
    body = {
        "prompt": prompt,
        "max_tokens": options.answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen = Seen()
    started_s = last_s = clock.monotonic_s()
    finished = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                seen.error = f"status {response.status_code}: {(await response.aread()).decode()[:200]}"
                return seen
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or line.startswith(":"):
                    continue
                if data == "[DONE]":
                    finished = True
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    seen.error = str(chunk["error"])
                    return seen
                seen.tokens = (chunk.get("usage") or {}).get("completion_tokens", seen.tokens)
                now_s = clock.monotonic_s()
                if chunk.get("choices"):
                    if seen.first_token_s:
                        seen.pauses_s.append(now_s - last_s)
                    else:
                        seen.first_token_s = now_s - started_s
                    last_s = now_s
    except httpx.HTTPError as error:
        seen.error = str(error) or type(error).__name__
    seen.end_s = clock.monotonic_s() - started_s
    if not finished and not seen.error:
        seen.error = "the stream broke off"
    return seen


def figures(seen: Sequence[Seen], seconds: float) -> dict[str, float]:
    """Seconds are p50 and p99 over requests that were answered whole; rates are of those, over all the time."""
    good = [each for each in seen if not each.error]
    tokens = sum(each.tokens for each in good)
    pauses = [pause for each in good for pause in each.pauses_s]
    return {
        "requests": len(seen),
        "failed": len(seen) - len(good),
        "failed_share": round(1 - len(good) / len(seen), 4) if seen else 0.0,
        "requests_per_second": round(len(good) / seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "first_token_seconds_p50": _percentile([each.first_token_s for each in good], 50),
        "first_token_seconds_p99": _percentile([each.first_token_s for each in good], 99),
        "inter_token_seconds_p50": _percentile(pauses, 50),
        "inter_token_seconds_p99": _percentile(pauses, 99),
        "end_to_end_seconds_p50": _percentile([each.end_s for each in good], 50),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0], 4) if values else 0.0
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 4)
