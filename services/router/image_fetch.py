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
FETCHES_MAX = 16
"""Of one router at a time."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
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
        each.is_global and not each.is_multicast and not each.is_reserved and each not in PROTOCOLS
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


class ImageFetcher:
    """For one event loop. `trusted_hosts` may have private addresses and speak plain http."""

    def __init__(
        self,
        *,
        trusted_hosts: Collection[str] = (),
        allowed: Callable[[str], bool] = is_public,
        seconds_max: float = FETCH_SECONDS_MAX,
        bytes_max: int = IMAGE_BYTES_MAX,
    ) -> None:
        self._trusted = frozenset(trusted_hosts)
        self._allowed = allowed
        self._seconds_max = seconds_max
        self._bytes_max = bytes_max
        self._turns = asyncio.Semaphore(FETCHES_MAX)

    async def fetched(
        self, sources: Sequence[recipe.ImageSource], *, field: str, deadline: Deadline
    ) -> list[recipe.ImageSource]:
        """The same sources, with bytes in the place of URLs; each URL is fetched once.

        Raises ImageError naming the first image that cannot be fetched, DeadlineError.
        """
        wanted = {source.url: source for source in reversed(sources) if source.url is not None}
        if not wanted:
            return list(sources)
        tasks = {
            url: asyncio.ensure_future(self._fetch(url, _Refuse(field, source.path))) for url, source in wanted.items()
        }
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

    async def _fetch(self, url: str, refuse: _Refuse) -> bytes:
        async with self._turns:
            try:
                async with asyncio.timeout(self._seconds_max):
                    return await self._follow(url, refuse)
            except TimeoutError:
                message = f"the image did not arrive within {self._seconds_max:g} seconds"
                raise refuse("Fetch", message) from None
            except httpx.HTTPError as error:
                message = f"the image could not be fetched: {type(error).__name__}"
                raise refuse("Fetch", message) from error

    async def _follow(self, url: str, refuse: _Refuse) -> bytes:
        for _ in range(1 + REDIRECTS_MAX):
            found = await self._get(self._checked_url(url, refuse), refuse)
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

    async def _get(self, url: httpx.URL, refuse: _Refuse) -> bytes | str:
        """The image's bytes, or where it has moved."""
        address = await self._address(url, refuse)
        # One client a connection: nothing is ever sent to an address that was checked for another name.
        host = url.netloc.decode("ascii")
        async with (
            httpx.AsyncClient(trust_env=False, timeout=self._seconds_max) as client,
            client.stream(
                "GET",
                url.copy_with(host=address),
                headers={"host": host, "accept": "image/*", "user-agent": "whalepod"},
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if response.has_redirect_location:
                return str(url.join(response.headers["location"]))
            if not response.is_success:
                raise refuse("Fetch", f"the image's host answered {response.status_code}")
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > self._bytes_max:
                    message = f"the image is larger than {self._bytes_max >> 20} MiB"
                    raise refuse("ImageTooLarge", message)
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
