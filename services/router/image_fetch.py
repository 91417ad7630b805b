"""Images behind URLs: fetched by the router, once, and only from where a stranger may send it.

    https URL ─▶ resolve ─▶ every address checked ─▶ connect to a checked one ─▶ bytes, up to a limit, in time
                    └──────────── each redirect begins anew ────────────┘

The prompt layer has a fetcher too, but no deadline: a host that says nothing would hold a thread for good. Addresses
are checked where the connection is made, so a name that resolves to another address a moment later gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import deepseek_recipe as recipe
import httpx

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError, ImageError

FETCH_SECONDS_MAX = 20.0
"""For one image, redirects included."""
IMAGE_BYTES_MAX = 32 << 20
"""Of one fetched image: what the prompt layer takes."""
REDIRECTS_MAX = 3
REQUEST_BYTES_MAX = 64 << 20
"""Of all images of one request: what the prompt layer takes."""
FETCHES_MAX = 16
"""Of one router at a time."""
REQUEST_FETCHES_MAX = 4
"""Of one request at a time: hosts that say nothing hold up nobody else's."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
UNICAST = ipaddress.IPv6Network("2000::/3")
"""Where the internet has its IPv6 addresses; `ipaddress` calls others global too, site-local ones among them."""
PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")
"""For protocols, not for hosts; some versions of `ipaddress` call parts of it global."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: str) -> bool:
    """Whether anybody on the internet could reach the same host there; an address inside another counts as both."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(
        each.is_global
        and not each.is_multicast
        and not each.is_reserved
        and each not in PROTOCOLS
        and (each.version == 4 or each in UNICAST)
        for each in _layers(parsed)
    )


def _layers(address: Address) -> list[Address]:
    """The address, or the IPv4 address that it stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner = [address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address, *(each for each in inner if each is not None)]


@dataclass(frozen=True, slots=True)
class _Refuse:
    """Makes the errors of one image."""

    field: str
    place: str

    def __call__(self, kind: str, message: str) -> ImageError:
        return ImageError(self.field, kind, message, place=self.place)


@dataclass(slots=True)
class _Room:
    """What the images of one request may still bring."""

    bytes_left: int


class ImageFetcher:
    """For one event loop. `trusted_hosts` may have private addresses and speak plain http."""

    def __init__(
        self,
        *,
        trusted_hosts: Collection[str] = (),
        allowed: Callable[[str], bool] = is_public,
        seconds_max: float = FETCH_SECONDS_MAX,
        bytes_max: int = IMAGE_BYTES_MAX,
        request_bytes_max: int = REQUEST_BYTES_MAX,
    ) -> None:
        self._trusted = frozenset(trusted_hosts)
        self._allowed = allowed
        self._seconds_max = seconds_max
        self._bytes_max = bytes_max
        self._request_bytes_max = request_bytes_max
        self._turns = asyncio.Semaphore(FETCHES_MAX)
        self._tls = httpx.create_ssl_context(trust_env=False)  # once: it takes the event loop some 20 ms

    async def fetched(
        self, sources: Sequence[recipe.ImageSource], *, field: str, deadline: Deadline
    ) -> list[recipe.ImageSource]:
        """The same sources, with bytes in the place of URLs; each URL is fetched once.

        Raises ImageError naming the first image that cannot be fetched, DeadlineError.
        """
        wanted = {source.url: source for source in reversed(sources) if source.url is not None}
        if not wanted:
            return list(sources)
        turns, room = asyncio.Semaphore(REQUEST_FETCHES_MAX), _Room(self._request_bytes_max)

        async def fetch(url: str, refuse: _Refuse) -> bytes:
            async with turns:
                return await self._fetch(url, refuse, room)

        tasks = {url: asyncio.create_task(fetch(url, _Refuse(field, source.path))) for url, source in wanted.items()}
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.gather(*tasks.values())
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while its images were being fetched") from None
        finally:
            for task in tasks.values():
                task.cancel()
        return [
            source
            if source.url is None
            else recipe.BytesImageSource(tasks[source.url].result(), source.detail, path=source.path)
            for source in sources
        ]

    async def _fetch(self, url: str, refuse: _Refuse, room: _Room) -> bytes:
        async with self._turns:
            try:
                async with asyncio.timeout(self._seconds_max):
                    return await self._follow(url, refuse, room)
            except TimeoutError:
                message = f"the image did not arrive within {self._seconds_max:g} seconds"
                raise refuse("Fetch", message) from None
            except httpx.HTTPError as error:
                message = f"the image could not be fetched: {type(error).__name__}"
                raise refuse("Fetch", message) from error

    async def _follow(self, url: str, refuse: _Refuse, room: _Room) -> bytes:
        for _ in range(1 + REDIRECTS_MAX):
            found = await self._get(self._checked_url(url, refuse), refuse, room)
            if isinstance(found, bytes):
                return found
            url = found
        raise refuse("Fetch", f"the image is behind more than {REDIRECTS_MAX} redirects")

    def _checked_url(self, url: str, refuse: _Refuse) -> httpx.URL:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise refuse("InvalidUrl", "the image's URL is malformed") from error
        plain = parsed.scheme == "http" and parsed.host in self._trusted
        if not (parsed.scheme == "https" or plain) or not parsed.host or parsed.userinfo:
            raise refuse("InvalidUrl", "images are fetched over https, from URLs without a name and password")
        return parsed

    async def _get(self, url: httpx.URL, refuse: _Refuse, room: _Room) -> bytes | str:
        """The image's bytes, or where it has moved."""
        address = await self._address(url, refuse)
        # One client a connection: nothing is ever sent to an address that was checked for another name.
        host = url.netloc.decode("ascii")
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=self._seconds_max) as client,
            client.stream(
                "GET",
                url.copy_with(host=address),
                headers={"host": host, "accept": "image/*", "accept-encoding": "identity", "user-agent": "whalepod"},
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if response.has_redirect_location:
                return _joined(url, response.headers["location"], refuse)
            if not response.is_success:
                raise refuse("Fetch", f"the image's host answered {response.status_code}")
            data = bytearray()
            async for chunk in response.aiter_raw():  # an image that is packed once more is none
                data += chunk
                room.bytes_left -= len(chunk)
                if len(data) > self._bytes_max:
                    message = f"the image is larger than {self._bytes_max >> 20} MiB"
                    raise refuse("ImageTooLarge", message)
                if room.bytes_left < 0:
                    message = f"the images of a request are larger than {self._request_bytes_max >> 20} MiB"
                    raise refuse("TotalSizeTooLarge", message)
            return bytes(data)

    async def _address(self, url: httpx.URL, refuse: _Refuse) -> str:
        """One that the host has, and that may be connected to."""
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise refuse("Fetch", "the image's host has no address") from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if url.host in self._trusted or self._allowed(address):
                return address
        raise refuse("DestinationRejected", "the image's host is not one that images are fetched from")


def _joined(url: httpx.URL, location: str, refuse: _Refuse) -> str:
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError) as error:
        raise refuse("InvalidUrl", "the image has moved to a URL that is malformed") from error
