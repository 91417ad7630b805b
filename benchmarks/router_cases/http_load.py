"""A client that costs little: keep-alive connections, bodies made beforehand, answers looked at only where they end.

    python -m router_cases.http_load        (a process of `client_processes`, which tells it what to do)

As processes of their own, clients do not wait for their turn behind the events of others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import uvloop

from whalepod.core.clock import SYSTEM_CLOCK

HEAD_END, CHUNKS_END, EVENT = b"\r\n\r\n", b"\r\n0\r\n\r\n", b"data: "


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


class Connection(asyncio.Protocol):
    """One request at a time. Of an answer it looks at the head, counts the events, and finds the end: an event costs
    this process a few microseconds, and it keeps the time at which it came and not the one at which a task woke up."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[None] | None = None
        self._head = b""
        self._body_left: int | None = None
        """Bytes; None: the answer is in chunks, or has not begun."""
        self._tail = b""
        self._times_s: list[float] = []

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def ask(self, request: bytes) -> Answered:
        """Raises RuntimeError on any answer but 200, and if the connection is closed before the answer's end."""
        assert self._transport is not None
        self._head, self._tail, self._times_s = b"", b"", []
        self._answer = asyncio.get_running_loop().create_future()
        began_s = SYSTEM_CLOCK.monotonic_s()
        self._transport.write(request)
        await self._answer
        end_s = SYSTEM_CLOCK.monotonic_s()
        gaps = tuple(after - before for before, after in pairwise(self._times_s))
        return Answered(self._times_s[0] - began_s, end_s - began_s, gaps)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        if not self._head.endswith(HEAD_END):
            head, found, data = (self._head + data).partition(HEAD_END)
            self._head = head + found
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._end(RuntimeError((head + data).decode(errors="replace")))
                return
            self._body_left = _content_length(head)
            self._times_s += [now_s] * (self._body_left is not None)
        if self._body_left is not None:
            self._body_left -= len(data)
            ended = self._body_left <= 0
        else:
            seen = self._tail + data
            self._times_s += [now_s] * (seen.count(EVENT) - self._tail.count(EVENT))
            self._tail = seen[-len(CHUNKS_END) :]
            ended = self._tail == CHUNKS_END
        if ended:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or RuntimeError("the connection was closed"))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)


def _content_length(head: bytes) -> int | None:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n")[0]) if found else None


@dataclass(frozen=True, slots=True)
class Load:
    """What one client process does. `connections` are opened beforehand.

    closed: so many `requests`, each connection sending the next when it has its answer. streams: one on each
    connection, all at once. open: so many `requests`, `per_s` a second, whatever has become of those before.
    """

    kind: Literal["closed", "streams", "open"]
    port: int
    connections: int
    requests: int
    per_s: float = 0.0


async def run_load(load: Load, request: bytes, opened: list[Connection]) -> list[Answered]:
    if load.kind == "closed":
        return await closed_loop(opened, request, requests=load.requests)
    if load.kind == "streams":
        return await asyncio.gather(*(connection.ask(request) for connection in opened))
    return await open_loop(opened, request, port=load.port, requests=load.requests, per_s=load.per_s)


async def closed_loop(opened: Sequence[Connection], request: bytes, *, requests: int) -> list[Answered]:
    left = requests
    answers: list[Answered] = []

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            answers.append(await connection.ask(request))

    await asyncio.gather(*map(work, opened))
    return answers


async def open_loop(
    opened: Sequence[Connection], request: bytes, *, port: int, requests: int, per_s: float
) -> list[Answered]:
    idle = list(opened)
    answers: list[Answered] = []

    async def ask() -> None:
        connection = idle.pop() if idle else await Connection.open(port)
        answers.append(await connection.ask(request))
        idle.append(connection)

    began_s = SYSTEM_CLOCK.monotonic_s()
    asked: list[asyncio.Task[None]] = []
    for index in range(requests):
        await asyncio.sleep(max(0.0, began_s + index / per_s - SYSTEM_CLOCK.monotonic_s()))
        asked.append(asyncio.create_task(ask()))
    await asyncio.gather(*asked)
    return answers


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def order_bytes(load: Load, request: bytes) -> bytes:
    """What a client process reads first."""
    return json.dumps({"load": asdict(load), "bytes": len(request)}).encode() + b"\n" + request


async def serve_order() -> None:
    """Reads an order, opens its connections, says so, and begins when it is told to. Its last line: when it began and
    ended (monotonic seconds of the machine), and its answers."""
    order = json.loads(sys.stdin.buffer.readline())
    request = sys.stdin.buffer.read(order["bytes"])
    load = Load(**order["load"])
    opened = [await Connection.open(load.port) for _ in range(load.connections)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not await asyncio.to_thread(sys.stdin.buffer.readline):
        return
    began_s = SYSTEM_CLOCK.monotonic_s()
    answers = await run_load(load, request, opened)
    told = {"began_s": began_s, "ended_s": SYSTEM_CLOCK.monotonic_s(), "answers": [astuple(one) for one in answers]}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    uvloop.run(serve_order())
