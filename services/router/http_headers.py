"""Header names as users write them, and the id that a request is known by outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whalepod.cluster.registration import RankInfo
from whalepod.core.errors import InvalidFieldError
from whalepod.core.ids import RankId, mint_request_id

from .http_errors import HeadersTooLargeError, error_response

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_BYTES_MAX = 256
HEADER_BYTES_MAX = 64 * 1024
"""All names and values of a request together."""
SESSION_HEADER = "x-session-id"
RANK_HEADER = "x-data-parallel-rank"
"""vLLM's: which decode rank is to serve the request, by its number."""
SINGLE_HEADERS = frozenset({"authorization", "x-api-key", "x-tenant-id", "origin", "sec-fetch-site"})
"""What says who asks. A proxy that sets `x-tenant-id` may pass on a client's `x_tenant_id` beside it: of two values
neither can be believed."""
_SINGLE_NAMES = frozenset(name.encode() for name in SINGLE_HEADERS)


class HeaderMiddleware:
    """Takes `_` in a header's name for `-`, gives a request without an id one, and echoes the id in the answer.

    The id is the client's word: it is never a key of anything inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES_MAX:
            error = HeadersTooLargeError(f"the request's headers are larger than {HEADER_BYTES_MAX} bytes")
            await error_response(error)(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            known = name.lower().replace(b"_", b"-")
            if known in _SINGLE_NAMES and headers.get(known, value) != value:
                await error_response(given_twice(known.decode()))(scope, receive, send)
                return
            headers[known] = value
        key = REQUEST_ID_HEADER.encode()
        request_id = headers.get(key, b"")[:REQUEST_ID_BYTES_MAX] or mint_request_id().hex().encode()
        headers[key] = request_id

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (key, request_id)]
            return send(message)

        await self._app({**scope, "headers": list(headers.items())}, receive, send_with_id)


def wanted_rank(headers: Mapping[str, str], decode_ranks: Callable[[], Sequence[RankInfo]]) -> RankId | None:
    """The decode rank that a request names; None: any. Raises InvalidFieldError if there is none of that number among
    those usable now."""
    value = headers.get(RANK_HEADER)
    if not value:
        return None
    rank, usable = RankId(f"decode-{value}"), [one.rank_id for one in decode_ranks()]
    if usable and rank not in usable:
        raise InvalidFieldError(RANK_HEADER, f"{RANK_HEADER} must be the number of one of {', '.join(sorted(usable))}")
    return rank


def given_twice(name: str) -> InvalidFieldError:
    return InvalidFieldError(name, f"{name} is given twice, with different values: send it once")
