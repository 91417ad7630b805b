"""A RESP server that answers what a test tells it to, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import IO

from tests.kvstore.redis_server import free_port
from whalepod.kvstore.settings import StoreAddress

Handler = Callable[[list[bytes]], bytes | None]
"""From a command to the bytes of its reply; None closes the connection."""


class ScriptedServer:
    """Serves each connection in its own thread until it is closed."""

    def __init__(self, handler: Handler) -> None:
        self.connections = 0
        self.commands: list[list[bytes]] = []
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []
        self._threads[0].start()

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(host="127.0.0.1", port=self._listener.getsockname()[1])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, ValueError):
            while words := read_command(stream):
                self.commands.append(words)
                reply = self._handler(words)
                if reply is None:
                    return
                connection.sendall(reply)


def read_command(stream: IO[bytes]) -> list[bytes]:
    line = stream.readline()
    words: list[bytes] = []
    for _ in range(int(line[1:]) if line else 0):
        length = int(stream.readline()[1:])
        words.append((stream.read(length + 2) or b"")[:length])
    return words
