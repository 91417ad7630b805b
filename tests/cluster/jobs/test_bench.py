"""What a benchmark says of a server that is overloaded: failures beside the latencies of those that were answered."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from rich.console import Console

from whalepod.cluster.jobs.bench.load import LoadOptions, figures, run_load

ANSWER = (
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [{"text": "b"}], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)
BROKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
TOLD = b'data: {"error": {"message": "no room"}}\n\n'


def _response(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status.encode(), len(body), body)


FAILURES = {"refused": ("503 No", b"full"), "broken off": ("200 OK", BROKEN), "told": ("200 OK", TOLD)}


@pytest.mark.parametrize("how", FAILURES)
async def test_d13_one_answer_in_seven_that_fails_is_told_and_counts_for_no_rate(how: str) -> None:
    asked, failure = count(), _response(*FAILURES[how])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(failure if next(asked) % 7 == 0 else _response("200 OK", ANSWER))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        options = LoadOptions(requests=14, concurrency=3, prompt_tokens=4, answer_tokens=2)
        seen, seconds = await run_load(f"http://127.0.0.1:{port}", options, console=Console(quiet=True))
    measured = figures(seen, seconds)
    assert (measured["requests"], measured["failed"]) == (14, 2)
    assert measured["failed_share"] == round(2 / 14, 4)
    assert measured["requests_per_second"] == pytest.approx(12 / seconds, rel=0.01)
    assert measured["tokens_per_second"] == pytest.approx(24 / seconds, rel=0.01)
    assert measured["first_token_seconds_p50"] > 0
