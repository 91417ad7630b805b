"""Streams that break never look finished, and a client that leaves leaves no work behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import (
    RouterUnderTest,
    answer_to,
    check_nothing_is_left,
    failure_of,
    running_router,
    serving,
    stream_of,
    until,
)
from whalepod.core.errors import (
    InternalError,
)
from whalepod.services.router.http_stream import EventStream, data_frame

LONG = [400 + index % 90 for index in range(100)]
SHORT = LONG[:5]
RIGHT = expected_ids(LONG, 6)


@pytest.fixture
async def doomed(model_dir: Path, decode: FakeDecode, prefill: FakePrefill) -> AsyncIterator[RouterUnderTest]:
    """A router whose only decode rank is gone for good after three tokens."""
    decode.behaviour.gone_after_tokens = 3
    ranks = [decode, prefill]
    async with running_router(model_dir, ranks, remote_prefill_tokens_min=32, queue_timeout_seconds=0.3) as running:
        yield running


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_e10_a_stream_that_nobody_can_go_on_with_never_looks_finished(
    doomed: RouterUnderTest, decode: FakeDecode, prompt: list[int]
) -> None:
    async with stream_of(doomed, prompt=prompt, max_tokens=9, return_token_ids=True) as events:
        got = [event async for event in events]
    assert "[DONE]" not in got
    chunks = [json.loads(event) for event in got]
    assert chunks[-1]["error"]["code"] == "worker_lost"
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert all(choice["finish_reason"] is None for choice in choices)
    assert [token for choice in choices for token in choice["token_ids"]] == expected_ids(prompt, 3)
    decode.behaviour = Behaviour()
    await decode.server.restart()
    await until(lambda: doomed.readiness.report().ready)
    assert await answer_to(doomed, prompt) == expected_ids(prompt, 6)


async def test_e10_the_same_loss_is_an_error_status_when_nothing_was_streamed(doomed: RouterUnderTest) -> None:
    assert await failure_of(doomed, SHORT) == (502, "worker_lost")


async def test_e10_a_conversation_is_broken_off_in_the_same_way(doomed: RouterUnderTest) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    events = await doomed.stream("/v1/chat/completions", **body)
    assert json.loads(events[-1])["error"]["code"] == "worker_lost"
    assert not any('"finish_reason":"' in event for event in events)


async def test_an_error_of_one_choice_ends_all_choices(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.fail_after_tokens = (2, InternalError("a bug"))
    async with stream_of(router, prompt=[SHORT, LONG[:6]], n=2, max_tokens=9) as events:
        got = [event async for event in events]
    assert json.loads(got[-1])["error"]["code"] == "internal_error"
    await check_nothing_is_left(router, decode)


async def test_a_deadline_in_mid_stream_is_an_error_event(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour = Behaviour(pause_s=0.2)
    limits: dict[str, Any] = {"request_timeout_seconds": 0.5, "queue_timeout_seconds": 0.5}
    async with running_router(model_dir, [decode], prefill_replicas=0, **limits) as router:
        async with stream_of(router, prompt=SHORT, max_tokens=50) as events:
            got = [event async for event in events]
        assert json.loads(got[-1])["error"]["code"] == "deadline_exceeded"
        assert len(got) > 1
        await check_nothing_is_left(router, decode)


class Connection:
    """A client that closes its socket when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def post(cls, router: RouterUnderTest, body: dict[str, Any], *, times: int = 1) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        writer.write(times * (head.encode() + content))
        await writer.drain()
        return cls(reader, writer)

    def leave(self) -> None:
        self._writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_a7_a_client_that_leaves_in_mid_prefill_ends_both_legs(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, stream: bool
) -> None:
    prefill.behaviour.hang = True
    client = await Connection.post(router, {"prompt": LONG, "stream": stream})
    await until(lambda: prefill.running and decode.live)
    client.leave()
    await until(lambda: prefill.cancelled and decode.seen.cancels, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize("stream", [False, True])
async def test_a7_a_client_that_leaves_after_the_hand_off_releases_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, stream: bool
) -> None:
    decode.behaviour.step = asyncio.Event()
    client = await Connection.post(router, {"prompt": LONG, "stream": stream})
    await until(lambda: decode.seen.handoffs)
    client.leave()
    await until(lambda: decode.seen.cancels, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_a6_a_client_that_leaves_between_tokens_releases_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, prompt: list[int], stream: bool
) -> None:
    decode.behaviour = Behaviour(pause_s=0.01)
    client = await Connection.post(router, {"prompt": prompt, "stream": stream, "max_tokens": 2000})
    if stream:
        await client.reader.readuntil(b"data: ")
    else:
        await until(lambda: decode.live)
    client.leave()
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize("stream", [False, True])
async def test_a6_a_client_that_has_sent_its_next_requests_before_it_leaves_releases_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, stream: bool
) -> None:
    decode.behaviour = Behaviour(pause_s=0.01)
    client = await Connection.post(router, {"prompt": SHORT, "stream": stream, "max_tokens": 2000}, times=3)
    await until(lambda: decode.live)
    client.leave()
    await until(lambda: decode.seen.cancels)
    await check_nothing_is_left(router, decode)
    assert len(decode.seen.starts) == 1


async def test_a6_a_client_that_leaves_the_queue_gives_up_its_place(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.hang = True
    async with running_router(model_dir, [decode], prefill_replicas=0, max_concurrent_requests=1) as router:
        first = await Connection.post(router, {"prompt": SHORT})
        await until(lambda: decode.live)
        second = await Connection.post(router, {"prompt": SHORT})
        await until(lambda: router.front.admission.waiting == 1)
        second.leave()
        await until(lambda: router.front.admission.waiting == 0, timeout_s=1.0)
        first.leave()
        await check_nothing_is_left(router, decode)


async def test_a8_sockets_closed_within_milliseconds_leave_no_work_behind(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    decode.behaviour = Behaviour(pause_s=0.05)
    for index in range(60):
        prompt = LONG if index % 2 else SHORT
        client = await Connection.post(router, {"prompt": prompt, "stream": index % 3 == 0, "max_tokens": 1000})
        await asyncio.sleep(index % 6 / 1000)
        client.leave()
    await until(lambda: router.front.admission.running == 0, timeout_s=2.0)
    await check_nothing_is_left(router, decode, prefill)
    assert await answer_to(router, SHORT) == expected_ids(SHORT, 6)


async def test_a_stream_that_outlives_the_draining_is_told_why_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(0.05)
            yield data_frame("more")

    async with serving(EventStream(data_frame("first"), endless())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"more")
    told = (await reader.read()).decode()
    assert '"code":"unavailable"' in told
    assert told.endswith("0\r\n\r\n"), "the answer is whole"
    assert "[DONE]" not in told
    assert "Exception in ASGI" not in caplog.text
    writer.close()
