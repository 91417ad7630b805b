"""Serves the values that a rank holds to other ranks, over sockets, in the store's own protocol.

    accept ──▶ a thread a connection: HELLO, AUTH ──▶ GET, EXISTS, UNLINK …

So a reader uses the same client for a rank as for a Redis. Bytes from the network are untrusted: commands are bounded
in words and bytes, and nothing is allocated before that is checked.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading
from collections.abc import Sequence
from io import BufferedReader

from whalepod.core.errors import ConfigError
from whalepod.core.ids import NONCE_BYTES, mint_nonce

from . import metrics
from .direct_greeting import proof
from .held_values import HeldValues
from .value_format import BytesLike

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
WORDS_MAX = 64
WORD_BYTES_MAX = 4096
GREETING_S = 2.0
"""A connection that has not proved itself by then is closed."""
SEND_S = 10.0
"""A reader that takes nothing for so long is gone."""
IDLE_S = 600.0
IOV_MAX = 512


class DirectServer:
    """Listens from construction on. Raises ConfigError if it cannot. Port 0: any free one."""

    def __init__(self, held: HeldValues, *, key: bytes, host: str, port: int) -> None:
        self._held = held
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"the direct transport cannot listen on {host} port {port}: {error.strerror}") from None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="kv-direct", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """Idempotent. Ends every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._open) >= CONNECTIONS_MAX
                if not full:
                    self._open.add(connection)
            if full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-direct-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, BufferedReader(connection.makefile("rb", buffering=0), 64 << 10) as stream:
                _limit(connection, receive_s=GREETING_S)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(SEND_S), 0))
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._greeted(connection, stream):
                    _limit(connection, receive_s=IDLE_S)
                    while words := _read_command(stream):
                        _send(connection, self._answer(words))
        except (OSError, ValueError) as error:  # reset, stalled, or no command of ours
            logger.debug("direct: a connection ended: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)

    def _greeted(self, connection: socket.socket, stream: BufferedReader[socket.SocketIO]) -> bool:
        """Whether the other side has proved that it knows the key."""
        match _read_command(stream):
            case [b"HELLO", theirs] if len(theirs) == NONCE_BYTES:
                mine = mint_nonce()
            case _:
                return False
        shown = proof(self._key, b"holder", theirs, mine)
        _send(connection, [b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(mine), mine, len(shown), shown)])
        match _read_command(stream):
            case [b"AUTH", answer] if hmac.compare_digest(answer, proof(self._key, b"reader", theirs, mine)):
                _send(connection, [b"+OK\r\n"])
                return True
            case _:
                logger.warning("direct: somebody who does not know the cluster's secret was turned away")
                return False

    def _answer(self, words: Sequence[bytes]) -> Sequence[BytesLike]:
        match words:
            case [b"GET", key]:
                pieces = self._held.find(key)
                if pieces is None:
                    return [b"$-1\r\n"]
                size = sum(len(piece) for piece in pieces)
                metrics.BYTES.labels("served").inc(size)
                return [b"$%d\r\n" % size, *pieces, b"\r\n"]
            case [b"EXISTS", key]:
                return [b":%d\r\n" % (self._held.find(key) is not None)]
            case [b"UNLINK", key]:
                return [b":%d\r\n" % self._held.drop([key])]
            case _:
                return [b"-NOPERM a rank only serves reads\r\n"]


def _limit(connection: socket.socket, *, receive_s: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(receive_s), 0))


def _read_command(stream: BufferedReader[socket.SocketIO]) -> list[bytes]:
    """Words of the next command; empty at the end. Raises ValueError on anything that is no bounded command."""
    count = _announced(stream, b"*", WORDS_MAX)
    words: list[bytes] = []
    for _ in range(count or 0):
        size = _announced(stream, b"$", WORD_BYTES_MAX)
        data = stream.read(size + 2) if size is not None else b""
        if size is None or len(data) != size + 2 or not data.endswith(b"\r\n"):
            raise ValueError("a command broke off")
        words.append(data[:-2])
    return words


def _announced(stream: BufferedReader[socket.SocketIO], kind: bytes, largest: int) -> int | None:
    """The number in a line like `*3`; None at the end of the stream."""
    line = stream.readline(16)
    if not line:
        return None
    digits = line[1:].rstrip(b"\r\n")
    if line[:1] != kind or not line.endswith(b"\n") or not digits.isdigit() or int(digits) > largest:
        raise ValueError("not a command")
    return int(digits)


def _send(connection: socket.socket, pieces: Sequence[BytesLike]) -> None:
    views = [memoryview(piece) for piece in pieces]
    at = 0
    while at < len(views):
        sent = connection.sendmsg(views[at : at + IOV_MAX])
        while at < len(views) and sent >= len(views[at]):
            sent -= len(views[at])
            at += 1
        if sent:
            views[at] = views[at][sent:]
