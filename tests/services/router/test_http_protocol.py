"""The head of a request is bounded, in bytes and in time, and so is its body; others are served meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.router.router_under_test import RouterUnderTest
from whalepod.services.router import http_body, http_protocol
from whalepod.services.router.http_headers import HEADER_BYTES_MAX


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
