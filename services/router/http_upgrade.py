"""An offer of another protocol that is not taken up. Clients of Java make one with every request: HTTP/2 in plain text.

head with `upgrade` ─▶ parser: what follows is of that protocol ─▶ another parser, which goes on with the body
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


def parser_after_upgrade(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Takes the place of a parser that has just raised HttpParserUpgrade. It has seen a head that ends the same way but
    offers nothing; what is fed to it is body, and requests after that. The protocol's newest request goes on."""
    callbacks = _AfterHead(protocol)
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
    protocol.cycle.more_body = True  # the body was taken for the other protocol's
    protocol.cycle.message_event.clear()
    framing = [name + b": " + value for name, value in protocol.headers if name in _FRAMING]
    parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
    return parser


class _AfterHead:
    """A parser's callbacks: the protocol's own, from the end of the first head on."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._silent = True

    def on_message_begin(self) -> None:
        if not self._silent:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._silent:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._silent:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._silent:
            self._protocol.on_headers_complete()
        self._silent = False

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self._protocol.on_message_complete()
