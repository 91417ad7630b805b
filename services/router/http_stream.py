"""Answers that end when the client goes: whoever waits for one is cancelled as soon as the connection closes.

Until the first event is there nothing is sent, so that a request that fails early fails with its own status. After that
the status is 200 for good, and what goes wrong is one `error` event, after which the stream just closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from whalepod.core.errors import CancelledError, InternalError, ServingError, UnavailableError

from .http_errors import OPENAI_ERRORS, ErrorForm, json_text
from .http_protocol import Exchange
from .relay import Relay
from .router_metrics import STREAMS_BROKEN

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE_FRAME = b"data: [DONE]\n\n"


def data_frame(payload: str | Mapping[str, Any], *, event: str | None = None) -> bytes:
    """One server-sent event. JSON text has no raw line breaks, so one `data` line is enough."""
    text = payload if isinstance(payload, str) else json_text(payload)
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + text.encode("utf-8", "replace") + b"\n\n"


async def until_disconnect(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises CancelledError if the client goes first. The request's body must have
    been read."""
    caller = asyncio.current_task()
    assert caller is not None
    cancelling = caller.cancelling()
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        caller.cancel()

    exchange.watch(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and caller.uncancel() <= cancelling:
            raise CancelledError("the client went away") from None
        raise
    finally:
        exchange.watch(None)


class Outlet:
    """Where the events of one answer are written without waiting, once it has begun, while its client reads."""

    def __init__(self, exchange: Exchange) -> None:
        self.begun = False
        """The first event has been sent: others may follow."""
        self.relay: Relay[bytes] = Relay(lambda: self.begun and exchange.is_open(), exchange.write)


class EventStream:
    """A response of server-sent events, as an ASGI application. `frames` has already been advanced to `first`, and goes
    on beside what it gives to the outlet."""

    def __init__(
        self,
        first: bytes,
        frames: AsyncGenerator[bytes, None],
        *,
        errors: ErrorForm = OPENAI_ERRORS,
        outlet: Outlet | None = None,
    ) -> None:
        self._first = first
        self._frames = frames
        self._errors = errors
        self._outlet = outlet
        self._started = False
        self._without_chunks = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        exchange = Exchange.of(scope)
        try:
            await until_disconnect(exchange, self._send_all(exchange, send))
        except CancelledError:
            return
        except asyncio.CancelledError:  # by the server, whose time to drain is over
            if not self._started:
                raise
            await self._send_error(send, UnavailableError("this router is shutting down"))
            await self._send_end(exchange, send)
        finally:
            await self._frames.aclose()

    async def _send_all(self, exchange: Exchange, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # proxies must not hold tokens back
        }
        self._without_chunks = exchange.without_chunks()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        self._started = True
        await _send_frame(send, self._first)
        if self._outlet is not None:
            self._outlet.begun = True
        try:
            async for frame in self._frames:
                await _send_frame(send, frame)
        except ServingError as error:
            await self._send_error(send, error)
        except Exception:
            log.exception("a stream failed")
            await self._send_error(send, InternalError("an internal error ended this stream"))
        await self._send_end(exchange, send)

    async def _send_error(self, send: Send, error: ServingError) -> None:
        STREAMS_BROKEN.inc()
        await _send_frame(send, data_frame(self._errors.event_body(error), event=self._errors.event))

    async def _send_end(self, exchange: Exchange, send: Send) -> None:
        if self._without_chunks:
            exchange.end_without_chunks()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _send_frame(send: Send, frame: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": frame, "more_body": True})
