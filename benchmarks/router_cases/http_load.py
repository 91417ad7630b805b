"""A client that costs little: keep-alive connections, bodies made beforehand, answers looked at only where they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from whalepod.core.clock import SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds from the last byte sent to the first event (or byte of the answer), and to the end; and gaps between
    events."""

    first_s: float
    total_s: float
    gaps_s: tuple[float, ...]


def request_bytes(body: dict[str, Any], *, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def ask(self, request: bytes) -> Answered:
        """Raises RuntimeError on any answer but 200."""
        began_s = SYSTEM_CLOCK.monotonic_s()
        self._writer.write(request)
        await self._writer.drain()
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError((head + await self._reader.read(500)).decode(errors="replace"))
        lowered = head.lower()
        if b"content-length:" in lowered:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            first_s = SYSTEM_CLOCK.monotonic_s() - began_s
            await self._reader.readexactly(length)
            return Answered(first_s, SYSTEM_CLOCK.monotonic_s() - began_s, ())
        return await self._read_events(began_s)

    async def _read_events(self, began_s: float) -> Answered:
        times: list[float] = []
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            chunk = await self._reader.readexactly(size + 2)
            if not size:
                break
            if b"data: " in chunk:
                times.append(SYSTEM_CLOCK.monotonic_s())
        end_s = SYSTEM_CLOCK.monotonic_s()
        gaps = tuple(after - before for before, after in pairwise(times))
        return Answered(times[0] - began_s, end_s - began_s, gaps)

    def close(self) -> None:
        self._writer.close()


async def closed_loop(port: int, request: bytes, *, connections: int, requests: int) -> tuple[list[Answered], float]:
    """So many requests over so many connections, each sending the next when it has its answer. Answers, and seconds."""
    opened = await asyncio.gather(*(Connection.open(port) for _ in range(connections)))
    left = requests
    answers: list[Answered] = []

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            answers.append(await connection.ask(request))

    began_s = SYSTEM_CLOCK.monotonic_s()
    await asyncio.gather(*map(work, opened))
    seconds = SYSTEM_CLOCK.monotonic_s() - began_s
    for connection in opened:
        connection.close()
    return answers, seconds


async def open_loop(port: int, request: bytes, *, per_s: float, seconds: float) -> list[Answered]:
    """A request every 1/`per_s` seconds, whatever has become of those before it."""
    idle: list[Connection] = []
    answers: list[Answered] = []

    async def ask() -> None:
        connection = idle.pop() if idle else await Connection.open(port)
        answers.append(await connection.ask(request))
        idle.append(connection)

    began_s = SYSTEM_CLOCK.monotonic_s()
    asked: list[asyncio.Task[None]] = []
    for index in range(int(per_s * seconds)):
        await asyncio.sleep(max(0.0, began_s + index / per_s - SYSTEM_CLOCK.monotonic_s()))
        asked.append(asyncio.create_task(ask()))
    await asyncio.gather(*asked)
    for connection in idle:
        connection.close()
    return answers


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0
