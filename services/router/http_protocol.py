"""The HTTP parser with bounds that uvicorn leaves open: how long the head of a request may be, how long it may take,
and how long an answer waits for a client that does not read. A client that keeps to none of them is hung up on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .http_headers import HEADER_BYTES_MAX
from .http_transport import GatheringTransport

HEAD_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Of a head that is not complete. One that is gets judged, and answered, by `HeaderMiddleware`."""
HEAD_SECONDS_MAX = 30.0
STALL_SECONDS_MAX = 60.0
"""How long a client may leave its answer unread, once all buffers are full. Until then it holds its place here."""


_EXTENSION = "whalepod"


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
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._exchanges: list[Exchange] = []
        """Of requests without a complete answer: several if the client does not wait for one before it sends the
        next."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._gathering = GatheringTransport(transport, self.loop)
        super().connection_made(self._gathering)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._note_reading()
        super().connection_lost(exc)
        for exchange in self._exchanges:
            if not exchange.complete:
                exchange.leave()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()
        exchange = Exchange(self.cycle, self.flow, self._gathering)
        self.scope["extensions"] = {_EXTENSION: {"exchange": exchange}}  # before the application is called
        self._exchanges = [*(one for one in self._exchanges if not one.complete), exchange]

    def pause_writing(self) -> None:
        super().pause_writing()
        # What is buffered would wait for the client too, so it is dropped.
        self._stall_timer = asyncio.get_running_loop().call_later(STALL_SECONDS_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        self._note_reading()
        super().resume_writing()

    def _note_reading(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head_bytes = 0
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS_MAX, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
