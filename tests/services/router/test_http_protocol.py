"""The head of a request is bounded, in bytes and in time, and so is its body; others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.certificates import Authority
from tests.services.router.fake_ranks import Behaviour, FakeDecode
from tests.services.router.router_under_test import RouterUnderTest, serving, until
from whalepod.cluster.tls import ServerTls
from whalepod.services.router import http_body, http_protocol, http_transport
from whalepod.services.router.http_headers import HEADER_BYTES_MAX
from whalepod.services.router.http_protocol import BoundedHttpProtocol
from whalepod.services.router.http_stream import EventStream
from whalepod.services.router.http_transport import GatheringTransport

LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ALIVE = '{"status":"alive"}'


def asking(*, version: str = "1.1", headers: str = "", chunked: bool = False, **body: object) -> bytes:
    """A request for a completion."""
    content = json.dumps({"prompt": "Hello", "max_tokens": 6, **body}).encode()
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(content)}"
    lines = [f"POST /v1/completions HTTP/{version}", "host: x", "content-type: application/json", headers, framing]
    if chunked:
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    return "\r\n".join([*(line for line in lines if line), "", ""]).encode() + content


def connections_with_small_buffers(monkeypatch: pytest.MonkeyPatch) -> set[BoundedHttpProtocol]:
    """The open ones of those that are made from now on: what they send waits in the process."""
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
    return open_now


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
    pieces = [b"x" * 16_384 + ending for _ in range(4 * http_protocol.HEAD_BYTES_MAX // 16_384)]
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
    open_now = connections_with_small_buffers(monkeypatch)
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "next_one", [b"NONSENSE\r\n\r\n", b"GET /livez HT", b"GET /" + b"x" * http_protocol.HEAD_BYTES_MAX],
    ids=["no request", "a head that does not end", "a head that is too long"],
)  # fmt: skip
async def test_nothing_is_written_into_an_answer_that_is_under_way(
    router: RouterUnderTest, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch, next_one: bytes, stream: bool
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS_MAX", 0.05)
    decode.behaviour = Behaviour(pause_s=0.05)
    connection = await asyncio.open_connection("127.0.0.1", router.http_port)
    reader, writer = connection
    writer.write(asking(stream=stream))
    await until(lambda: decode.live)
    writer.write(next_one)
    end = "data: [DONE]\n\n\r\n0\r\n\r\n" if stream else "}}"
    told = (await reader.readuntil(end.encode())).decode()
    assert told.count("HTTP/1.1") == 1
    if next_one.endswith(b"HT"):
        writer.write(b"TP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).decode().endswith(ALIVE)
    else:
        assert await reader.read() == b""
    writer.close()


async def test_what_was_asked_before_a_wrong_request_is_answered_in_order(router: RouterUnderTest) -> None:
    told = await answer_to(router, asking() + asking(stream=True) + b"NONSENSE\r\n\r\n")
    first, second = told.split("HTTP/1.1 200 OK")[1:]
    assert '"finish_reason":"length"' in first
    assert second.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
async def test_an_offer_of_another_protocol_is_passed_over_and_the_body_is_read(
    router: RouterUnderTest, chunked: bool, piece_bytes: int
) -> None:
    """As clients of Java make it, in each request of a connection."""
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk"
    sent = 3 * asking(headers=offer, chunked=chunked) + LAST
    told = await answer_to(router, *(sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)))
    assert told.count('"finish_reason":"length"') == 3
    assert told.endswith(ALIVE)


@pytest.mark.parametrize("header", ["content-length: 99999999999", "content-type: text/html\r\ncontent-length: 9"])
async def test_who_is_refused_before_its_body_is_wanted_is_not_waited_for(router: RouterUnderTest, header: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n{header}\r\n\r\n"
    told = await answer_to(router, head.encode())
    assert told.startswith("HTTP/1.1 41")
    assert "connection: close" in told


async def test_who_waits_until_its_body_is_wanted_is_told_so_and_may_ask_again(router: RouterUnderTest) -> None:
    told = await answer_to(router, asking(headers="expect: 100-continue") + LAST)
    assert told.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert told.endswith(ALIVE)


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(router: RouterUnderTest) -> None:
    head, _, told = (await answer_to(router, asking(version="1.0", stream=True))).partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert all(event.startswith("data: ") for event in told.removesuffix("\n\n").split("\n\n"))
    assert told.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("piece", [b"x-more: " + b"x" * 1000 + b"\r\n", b"x" * 1000], ids=["many", "one"])
async def test_what_follows_a_body_has_an_end(router: RouterUnderTest, piece: bytes) -> None:
    endless = [100 * piece] * 4 * (1 + http_protocol.HEAD_BYTES_MAX // len(100 * piece))
    sent = asking(chunked=True).removesuffix(b"\r\n")
    told = await answer_to(router, sent, *endless)
    assert told == "" or told.startswith("HTTP/1.1 431")
    await router.complete(max_tokens=1)


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads something whenever it is looked whether it does, and nothing else."""
    monkeypatch.setattr(http_protocol, "STALL_SECONDS_MAX", 0.01)
    monkeypatch.setattr(http_transport, "UNREAD_SECONDS_MAX", 0.01)
    monkeypatch.setattr(http_transport, "READ_BYTES_MIN", 1)
    told: list[bytes] = []
    look = GatheringTransport._abort_if_unread

    def read_and_look(transport: GatheringTransport, before_bytes: int, seconds: float) -> None:
        with suppress(BlockingIOError):
            told.append(client.recv(1 << 16))
        look(transport, before_bytes, seconds)

    async def much() -> AsyncGenerator[bytes, None]:
        yield b"x" * (1 << 17)
        yield b"x" * (1 << 17)

    monkeypatch.setattr(GatheringTransport, "_abort_if_unread", read_and_look)
    connections_with_small_buffers(monkeypatch)
    async with serving(EventStream(b"x", much())) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            await until(lambda: len(told) > 5)
            while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                told.append(piece)
    assert b"".join(told).count(b"x") > 2 << 17
    assert told[-1].endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_over_tls_ends_its_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await asyncio.sleep(0.01)
                yield b"x"
        finally:
            ended.set()

    authority = Authority(tmp_path, "authority")
    pair = authority.issue("router")
    trusting = ssl.create_default_context(cafile=str(authority.pem))
    async with serving(EventStream(b"x", endless()), tls=ServerTls(cert_file=pair.cert, key_file=pair.key)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await until(ended.is_set)
    assert "Traceback" not in caplog.text
