"""The HTTP parser with bounds that uvicorn leaves open: how long the head of a request may be, how long it may take,
and how long an answer waits for a client that does not read. A client that keeps to none of them is hung up on.

Nothing is written into an answer that is under way: what is wrong with the request behind it shows when it has ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .http_headers import HEADER_BYTES_MAX
from .http_transport import GatheringTransport
from .http_upgrade import parser_after_upgrade

HEAD_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Of a head that is not complete, and of what follows the last part of a body. A complete head gets judged, and
answered, by `HeaderMiddleware`."""
HEAD_SECONDS_MAX = 30.0
STALL_SECONDS_MAX = 60.0
"""How long a client may leave its answer unread, once all buffers are full. Until then it holds its place here."""
PIPELINED_MAX = 8
"""Requests that are read before their turn, so that it is seen when their client leaves."""

_EXTENSION = "whalepod"
_REFUSAL = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b\n"


class Exchange:
    """One request and its answer. Beside what ASGI has for it: to write, and to hear that the client has left, without
    a task that waits."""

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl, transport: GatheringTransport) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport
        self._on_leave: Callable[[], object] | None = None

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        return scope["extensions"][_EXTENSION]["exchange"]

    @property
    def complete(self) -> bool:
        return self._cycle.response_complete

    @property
    def asked(self) -> bool:
        """The request has come whole, and waits for its answer or for the rest of it."""
        return not (self._cycle.more_body or self._cycle.response_complete)

    def be_last(self) -> None:
        """The connection ends with this answer."""
        self._cycle.keep_alive = False

    def without_chunks(self) -> bool:
        """For an answer of unknown length that is to begin: whether its client knows no chunks, and the end of the
        connection is the end. Then `end_without_chunks` goes before the last `send`."""
        if self._cycle.scope["http_version"] != "1.0":
            return False
        self._cycle.chunked_encoding, self._cycle.expected_content_length = False, sys.maxsize
        return True

    def end_without_chunks(self) -> None:
        self._cycle.expected_content_length = 0

    def is_open(self) -> bool:
        """Whether an answer in chunks has begun, has not ended, and its client is there and reads."""
        cycle = self._cycle
        begun = bool(cycle.chunked_encoding) and not (cycle.response_complete or cycle.disconnected)
        return begun and not (self._flow.write_paused or self._transport.is_closing())

    def write(self, body: bytes) -> None:
        """What `send` does with a part of such an answer, at once, while it is open."""
        if body:
            self._transport.write_now(b"%x\r\n%b\r\n" % (len(body), body))

    def watch(self, on_leave: Callable[[], object] | None) -> None:
        """`on_leave` is called, soon, if the client leaves or has left before it has its answer; None: nothing is, from
        now on. The request's body must have been read."""
        self._on_leave = on_leave
        if on_leave is None:
            return
        self._flow.resume_reading()  # else nobody would see it leave
        if self._cycle.disconnected:
            asyncio.get_running_loop().call_soon(self.leave)

    def leave(self) -> None:
        """The connection is lost."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **named)
        self._in_head = False
        self._deaf = False
        """It has been refused: what it still sends is passed over."""
        self._unread_bytes = 0
        """That came since a head began, or a part of a body."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._exchanges: deque[Exchange] = deque()
        """Of requests without a complete answer, in order: several if the client does not wait for one before it sends
        the next."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._gathering = GatheringTransport(transport, self.loop)
        super().connection_made(self._gathering)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._gathering.stop_looking()
        for exchange in self._unanswered():
            exchange.leave()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._unread_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request")
            return
        if self._unread_bytes > HEAD_BYTES_MAX:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._in_head and self._head_timer is None and not self._unanswered():
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._unread_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        app = self.app
        if self.expect_100_continue:
            self.app = _last_if_body_is_not_wanted(app)  # pyright: ignore[reportArgumentType]  of starlette, one thing
        super().on_headers_complete()
        self.app = app
        exchange = Exchange(self.cycle, self.flow, self._gathering)
        self.scope["extensions"] = {_EXTENSION: {"exchange": exchange}}  # before the application is called
        self._unanswered().append(exchange)
        if 0 < len(self.pipeline) < PIPELINED_MAX:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # of what nobody speaks here
                self.parser = parser_after_upgrade(self)
                data = data[offer.args[0] :]

    def _unanswered(self) -> deque[Exchange]:
        while self._exchanges and self._exchanges[0].complete:
            self._exchanges.popleft()
        return self._exchanges

    def pause_writing(self) -> None:
        super().pause_writing()
        # What is buffered would wait for the client too, so it is dropped.
        self._gathering.abort_unread(STALL_SECONDS_MAX)

    def resume_writing(self) -> None:
        if not self._gathering.is_closing():
            self._gathering.stop_looking()
        super().resume_writing()

    def _await_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS_MAX, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        """The connection ends: after the answers to what was asked in order, or else with this status."""
        self._stop_waiting()
        self._deaf = True
        asked = [exchange for exchange in self._unanswered() if exchange.asked]
        if asked:
            asked[-1].be_last()
            return
        if not self.transport.is_closing():
            answered = not self._in_head and self.cycle and self.cycle.response_started
            if not answered:
                self.transport.write(_REFUSAL % (status, len(status) + 1, status))
            self.transport.close()


def _last_if_body_is_not_wanted(app: ASGIApp) -> ASGIApp:
    """The application for a request that waits until its body is wanted. If it is answered instead, the connection
    ends with the answer: the client may send the body or not, and what came next could be either."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        wanted = False

        async def receive_wanted() -> Message:
            nonlocal wanted
            wanted = True
            return await receive()

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and not wanted:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive_wanted, send_last)

    return serve
