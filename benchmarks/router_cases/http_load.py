"""A client that costs little: keep-alive connections, bodies made beforehand, answers looked at only where they end.

    python -m router_cases.http_load --port P --per-s R --seconds S < request > seconds to each first event
    python -m router_cases.http_load --port P --connections C --requests N --begin-s T < request > when it ended

As a process of its own, it does not wait for its turn behind the events of other streams; several of them ask more than
one core's worth, all from the same moment on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import uvloop

from whalepod.core.clock import SYSTEM_CLOCK

PROCESS_START_S = 3.0
"""Other processes have begun by then, and asked once over each of their connections."""
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


async def open_loop_apart(port: int, request: bytes, *, per_s: float, seconds: float) -> list[float]:
    """The same in another process. Seconds to each answer's first event."""
    words = ["--port", str(port), "--per-s", str(per_s), "--seconds", str(seconds)]
    return json.loads(await _told_by_another(words, request))


async def closed_loop_apart(
    port: int, request: bytes, *, connections: int, requests: int, processes: int
) -> tuple[int, float]:
    """`closed_loop` shared out among so many other processes. Requests that were answered, and seconds."""
    begin_s = SYSTEM_CLOCK.monotonic_s() + PROCESS_START_S
    each = ["--port", str(port), "--begin-s", str(begin_s)]
    each += ["--connections", str(max(1, connections // processes)), "--requests", str(max(1, requests // processes))]
    told = await asyncio.gather(*(_told_by_another(each, request) for _ in range(processes)))
    return max(1, requests // processes) * processes, max(map(float, told)) - begin_s


async def _told_by_another(words: Sequence[str], request: bytes) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router_cases.http_load", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    told, _ = await process.communicate(request)
    if process.returncode:
        raise RuntimeError("a client's process failed")
    return told.decode()


async def _from_then_on(port: int, request: bytes, *, connections: int, requests: int, begin_s: float) -> float:
    """When the last of them was answered. Raises RuntimeError if it could not begin in time."""
    await closed_loop(port, request, connections=connections, requests=connections)
    wait_s = begin_s - SYSTEM_CLOCK.monotonic_s()
    if wait_s < 0:
        raise RuntimeError(f"this process was {-wait_s:.1f} s too late to begin with the others")
    await asyncio.sleep(wait_s)
    await closed_loop(port, request, connections=connections, requests=requests)
    return SYSTEM_CLOCK.monotonic_s()


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--per-s", type=float)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--connections", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--begin-s", type=float)
    told = vars(parser.parse_args())
    options = {name: value for name, value in told.items() if value is not None}
    request = sys.stdin.buffer.read()
    if "per_s" in options:
        answers = uvloop.run(open_loop(request=request, **options))
        sys.stdout.write(json.dumps([one.first_s for one in answers]))
    else:
        sys.stdout.write(json.dumps(uvloop.run(_from_then_on(request=request, **options))))


if __name__ == "__main__":
    main()
