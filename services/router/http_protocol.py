"""The HTTP parser with bounds that uvicorn leaves open: how long the head of a request may be, how long it may take,
and how long an answer waits for a client that does not read. A client that keeps to none of them is hung up on."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http_headers import HEADER_BYTES_MAX
from .http_transport import GatheringTransport

HEAD_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Of a head that is not complete. One that is gets judged, and answered, by `HeaderMiddleware`."""
HEAD_SECONDS_MAX = 30.0
STALL_SECONDS_MAX = 60.0
"""How long a client may leave its answer unread, once all buffers are full. Until then it holds its place here."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **named)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(GatheringTransport(transport, self.loop))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._note_reading()
        super().connection_lost(exc)

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
