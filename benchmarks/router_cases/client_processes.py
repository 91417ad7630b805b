"""Clients as processes of their own: as many as it takes that they are not what is measured.

clients ── order ──▶ each process: opens its connections ── ready ──▶ go ──▶ answers, and when it began and ended
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .http_load import Answered, Load, order_bytes

LINE_BYTES_MAX = 1 << 30
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Clients:
    """Processes whose connections are open."""

    _processes: Sequence[asyncio.subprocess.Process]

    async def run(self) -> tuple[list[Answered], float]:
        """Answers of all, and seconds from the first one's beginning to the last one's end."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        told = await asyncio.gather(*map(_told, self._processes))
        answers = [Answered(first_s, total_s, tuple(gaps)) for one in told for first_s, total_s, gaps in one["answers"]]
        return answers, max(one["ended_s"] for one in told) - min(one["began_s"] for one in told)


@asynccontextmanager
async def clients(request: bytes, loads: Sequence[Load]) -> AsyncGenerator[Clients]:
    """A process for each of `loads`, which all send the same request."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router_cases.http_load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            limit=LINE_BYTES_MAX,
        )
        for _ in loads
    ]
    try:
        async with asyncio.timeout(START_S):
            for process, load in zip(processes, loads, strict=True):
                assert process.stdin is not None
                process.stdin.write(order_bytes(load, request))
            for process in processes:
                assert process.stdout is not None
                if await process.stdout.readline() != b"ready\n":
                    raise RuntimeError("a client process did not start")
        yield Clients(processes)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def closed_loop(
    port: int, request: bytes, *, connections: int, requests: int, processes: int = 1
) -> tuple[list[Answered], float]:
    """So many requests over so many connections, divided among processes. Answers, and seconds."""
    count = min(processes, connections)
    shares = zip(divided(connections, count), divided(requests, count), strict=True)
    async with clients(request, [Load("closed", port, *share) for share in shares]) as ready:
        return await ready.run()


def streams(port: int, *, connections: int, processes: int) -> list[Load]:
    """One stream on each of so many connections."""
    return [Load("streams", port, share, share) for share in divided(connections, min(processes, connections))]


def divided(count: int, parts: int) -> list[int]:
    return [count // parts + (index < count % parts) for index in range(parts)]


async def _told(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a client process failed")
    return json.loads(line)
