"""Sends the requests of a batch, so many at a time, and writes each answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.ids import mint_request_id
from whalepod.core.progress import ProgressReport

from .files import BatchOutput, BatchRequest

TRY_AGAIN = frozenset({408, 429, 502, 503, 504})
PAUSE_S_FIRST = 0.5
PAUSE_S_MAX = 30.0
TELL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SendingOptions:
    concurrency: int = 32
    retry_max: int = 8
    """Further tries of a request whose answer says that another may help, or that got none."""
    timeout_s: float = 3600.0
    api_key: str | None = None


@dataclass(slots=True)
class Counts:
    done: int = 0
    failed: int = 0
    completion_tokens: int = 0
    """Of this run."""


async def send_all(
    requests: Sequence[BatchRequest],
    output: BatchOutput,
    *,
    url: str,
    options: SendingOptions,
    console: Console,
    clock: Clock = SYSTEM_CLOCK,
) -> Counts:
    """Send what `output` does not have yet. Every request has a line when this returns."""
    waiting = [request for request in requests if request.custom_id not in output.done]
    ids = {request.custom_id for request in requests}
    failed = sum(status != 200 for custom_id, status in output.done.items() if custom_id in ids)
    counts = Counts(len(requests) - len(waiting), failed)
    if counts.done:
        console.print(f"{counts.done} of {len(requests)} requests were done before")
    started_s = clock.monotonic_s()
    report = ProgressReport(
        "batch", unit="requests", total=len(requests), say=console.print, console=console, clock=clock
    )
    report.begin_at(counts.done)
    queue = iter(waiting)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    limits = httpx.Limits(max_connections=options.concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=options.timeout_s, limits=limits, headers=headers, trust_env=False
    ) as client:

        async def work() -> None:
            for request in queue:
                line = await _answer(client, request, options)
                output.append(line)
                _note(counts, line)

        def tell() -> None:
            rate = counts.completion_tokens / max(clock.monotonic_s() - started_s, 1e-9)
            report.note(counts.done, detail=f"{rate:.1f} tokens/s, {counts.failed} failed")

        async def keep_telling() -> None:
            """Also while a long answer is waited for."""
            while True:
                await asyncio.sleep(TELL_EVERY_S)
                tell()

        with report:
            teller = asyncio.create_task(keep_telling())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(options.concurrency, len(waiting))):
                        group.create_task(work())
            finally:
                teller.cancel()
            tell()
            report.finish()
    return counts


def _note(counts: Counts, line: dict[str, Any]) -> None:
    response = line["response"]
    counts.done += 1
    counts.failed += response is None or response["status_code"] != 200
    body = response["body"] if response is not None and isinstance(response["body"], dict) else {}
    usage = body.get("usage") or {}
    counts.completion_tokens += int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


async def _answer(client: httpx.AsyncClient, request: BatchRequest, options: SendingOptions) -> dict[str, Any]:
    """One line of output."""
    pause_s = PAUSE_S_FIRST
    for _ in range(options.retry_max):
        line, retry_after_s = await _try(client, request)
        if retry_after_s is None:
            return line
        await asyncio.sleep(max(pause_s, retry_after_s))
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
    return (await _try(client, request))[0]


async def _try(client: httpx.AsyncClient, request: BatchRequest) -> tuple[dict[str, Any], float | None]:
    """A line of output, and whether another try may help: after how many seconds at least."""
    try:
        answer = await client.post(request.url, json=dict(request.body))
    except httpx.HTTPError as error:
        return _line(request, None, {"code": "no_answer", "message": str(error) or type(error).__name__}), 0.0
    if answer.status_code not in TRY_AGAIN:
        return _line(request, answer, None), None
    asked = answer.headers.get("retry-after", "")
    return _line(request, answer, None), float(asked) if asked.isdigit() else 0.0


def _line(request: BatchRequest, answer: httpx.Response | None, error: dict[str, str] | None) -> dict[str, Any]:
    response: dict[str, Any] | None = None
    if answer is not None:
        try:
            body: Any = answer.json()
        except ValueError:
            body = answer.text
        request_id = answer.headers.get("x-request-id", "")
        response = {"status_code": answer.status_code, "request_id": request_id, "body": body}
    identity = f"batch_req_{mint_request_id().hex()}"
    return {"id": identity, "custom_id": request.custom_id, "response": response, "error": error}
