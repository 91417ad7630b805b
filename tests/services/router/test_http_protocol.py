"""The head of a request is bounded, in bytes and in time, and so is its body; others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from tests.services.router.router_under_test import RouterUnderTest, serving, until
from whalepod.services.router import http_body, http_protocol, http_transport
from whalepod.services.router.http_headers import HEADER_BYTES_MAX
from whalepod.services.router.http_protocol import BoundedHttpProtocol
from whalepod.services.router.http_stream import EventStream


async def answer_to(router: RouterUnderTest, *pieces: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(5):
            return (await reader.read()).decode()
    except ConnectionError:
        return ""
    finally:
        writer.close()


async def test_large_headers_are_refused_in_the_ordinary_form(router: RouterUnderTest) -> None:
    response = await router.http.get("/v1/models", headers={"x-large": "x" * HEADER_BYTES_MAX})
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
    assert (await router.http.get("/v1/models", headers={"x-large": "x" * 1000})).status_code == 200


@pytest.mark.parametrize("ending", [b"", b"\r\nx-next: "])
async def test_a_head_without_an_end_is_hung_up_on(router: RouterUnderTest, ending: bytes) -> None:
    pieces = [b"x" * 16_384 + ending for _ in range(2 + http_protocol.HEAD_BYTES_MAX // 16_384)]
    answer = await answer_to(router, b"GET /livez HTTP/1.1\r\nx-endless: ", *pieces)
    assert answer == "" or answer.startswith("HTTP/1.1 431")
    await router.complete(max_tokens=1)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nx-slow: "])
async def test_a_head_that_never_comes_is_not_waited_for(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS_MAX", 0.1)
    assert (await answer_to(router, sent)).startswith("HTTP/1.1 408")


async def test_a_body_that_never_comes_is_not_waited_for(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "BODY_SECONDS_MAX", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    answer = await answer_to(router, head + b"content-length: 100\r\n\r\n{")
    assert answer.startswith("HTTP/1.1 408")
    assert "request_timeout" in answer


async def test_a_client_that_leaves_the_end_of_its_answer_unread_is_hung_up_on(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits into the buffers here, so nothing else waits for it."""
    monkeypatch.setattr(http_transport, "UNREAD_SECONDS_MAX", 0.2)
    open_now: set[BoundedHttpProtocol] = set()
    made, lost = BoundedHttpProtocol.connection_made, BoundedHttpProtocol.connection_lost

    def made_small(protocol: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(protocol, transport)
        open_now.add(protocol)

    def noted_lost(protocol: BoundedHttpProtocol, exc: Exception | None) -> None:
        lost(protocol, exc)
        open_now.discard(protocol)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", made_small)
    monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", noted_lost)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", router.http_port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await until(lambda: open_now)
        (protocol,) = open_now
        await until(protocol.transport.is_closing)
        assert open_now, "all of the answer went into the system's buffers"
        await until(lambda: not open_now)


async def test_a_client_that_does_not_read_is_hung_up_on_and_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_SECONDS_MAX", 0.2)
    sent: list[int] = []
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                sent.append(1 << 16)
                await asyncio.sleep(0)
                yield b"x" * sent[-1]
        finally:
            ended.set()

    async with serving(EventStream(b"x", endless())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(ended.is_set)
        assert sum(sent) < 1 << 26, "what is buffered is bounded"
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
