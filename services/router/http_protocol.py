"""The HTTP parser with bounds on the head of a request, which uvicorn leaves open: how long it may be, how long it may
take. A client that keeps to neither is told so, as far as it listens, and hung up on."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .http_headers import HEADER_BYTES_MAX

HEAD_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""Of a head that is not complete. One that is gets judged, and answered, by `HeaderMiddleware`."""
HEAD_SECONDS_MAX = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*args, **named)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
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
