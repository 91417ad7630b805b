"""Images behind URLs: from where a stranger may send the router, how much, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import deepseek_recipe as recipe
import pytest

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError, ImageError
from whalepod.services.router.image_fetch import REQUEST_FETCHES_MAX, ImageFetcher, is_public

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2002:7f00:1::", "2002:0a00:1::", "fec0::1", "64:ff9b:1::7f00:1", "4000::1", "no address", "",
    ],
)  # fmt: skip
def test_every_other_address_is_not(address: str) -> None:
    assert not is_public(address)


@asynccontextmanager
async def host(answer: Answer) -> AsyncGenerator[str, None]:
    """An HTTP host on this machine; yields its base URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        try:
            await answer(head, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def reply(writer: asyncio.StreamWriter, body: bytes, *, status: str = "200 OK", more: str = "") -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n".encode() + body)


async def fetched(fetcher: ImageFetcher, *urls: str, timeout_s: float = 10.0) -> list[bytes | None]:
    sources = [recipe.UrlImageSource(url, "low", path=f"messages.0.content[{n}]") for n, url in enumerate(urls)]
    found = await fetcher.fetched(sources, field="messages", deadline=Deadline.after(timeout_s))
    assert [source.detail for source in found] == ["low"] * len(urls)
    return [source.data for source in found]


def trusting(**limits: float) -> ImageFetcher:
    return ImageFetcher(trusted_hosts=["127.0.0.1"], **limits)  # type: ignore[arg-type]


async def test_bytes_come_in_the_place_of_urls_and_each_url_is_asked_once() -> None:
    heads: list[str] = []

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        reply(writer, head.split()[1].encode())

    async with host(answer) as base:
        assert await fetched(trusting(), f"{base}/a", f"{base}/b", f"{base}/a") == [b"/a", b"/b", b"/a"]
        assert len(heads) == 2
        assert all(f"host: {base.removeprefix('http://')}" in head.lower() for head in heads)
    data = recipe.DataUrlImageSource("data:image/png;base64,AAAA")
    assert await trusting().fetched([data], field="messages", deadline=Deadline.after(1)) == [data]


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://127.0.0.1/x", "DestinationRejected"),
        ("https://localhost/x", "DestinationRejected"),
        ("https://[::1]/x", "DestinationRejected"),
        ("https://2130706433/x", "DestinationRejected"),
        ("https://169.254.169.254/latest/meta-data", "DestinationRejected"),
        ("http://93.184.216.34/x", "InvalidUrl"),
        ("file:///etc/hosts", "InvalidUrl"),
        ("https://user:word@example.com/x", "InvalidUrl"),
        ("https:///x", "InvalidUrl"),
        ("https://no-such-host.invalid/x", "Fetch"),
    ],
)
async def test_nobody_is_sent_where_a_stranger_must_not_go(url: str, kind: str) -> None:
    with pytest.raises(ImageError, match=r"^messages\.0\.content\[0\]: ") as refused:
        await fetched(ImageFetcher(), url)
    assert (refused.value.kind, refused.value.field) == (kind, "messages")


async def test_a_redirect_is_checked_like_the_url_it_leads_to() -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        target = {
            "/inside": "https://10.0.0.1/x",
            "/near": "/image",
            "/file": "file:///etc/hosts",
            "/round": "/round",
            "/bad": "http://[",
        }
        path = head.split()[1]
        if path == "/image":
            reply(writer, b"image")
        else:
            reply(writer, b"", status="302 Found", more=f"location: {target[path]}\r\n")

    async with host(answer) as base:
        assert await fetched(trusting(), f"{base}/near") == [b"image"]
        for path, kind in (
            ("inside", "DestinationRejected"),
            ("file", "InvalidUrl"),
            ("bad", "InvalidUrl"),
            ("round", "Fetch"),
        ):
            with pytest.raises(ImageError) as refused:
                await fetched(trusting(), f"{base}/{path}")
            assert refused.value.kind == kind


async def test_images_of_one_request_are_bounded_together_and_leave_turns_to_others() -> None:
    open_now = most = 0

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        reply(writer, bytes(600))

    async with host(answer) as base:
        urls = [f"{base}/{number}" for number in range(12)]
        assert len(await fetched(trusting(), *urls)) == 12
        assert most == REQUEST_FETCHES_MAX
        with pytest.raises(ImageError) as refused:
            await fetched(trusting(bytes_max=1000, request_bytes_max=1000), *urls)
        assert refused.value.kind == "TotalSizeTooLarge"


async def test_a_host_that_says_too_much_nothing_or_no_is_told_apart() -> None:
    hung = asyncio.Event()

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        if "/large" in head:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(4096))
        elif "/slow" in head:
            await hung.wait()
        else:
            reply(writer, b"no", status="404 Not Found")

    async with host(answer) as base:
        fetcher = trusting(seconds_max=0.3, bytes_max=1024)
        for path, kind in (("large", "ImageTooLarge"), ("slow", "Fetch"), ("gone", "Fetch")):
            with pytest.raises(ImageError) as refused:
                await fetched(fetcher, f"{base}/{path}")
            assert refused.value.kind == kind
        with pytest.raises(DeadlineError):
            await fetched(trusting(), f"{base}/slow", timeout_s=0.1)
        hung.set()
