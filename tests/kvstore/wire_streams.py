"""What a misbehaving server may send (`wire_fuzz.py`): replies to reads and writes, damaged, in any pieces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from tests.kvstore.values import LAYOUT, NAMESPACE, chain, payload_of
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.ids import Incarnation
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.value_mac import ValueMac
from whalepod.kvstore.value_writer import ValueWriter

KEYS = chain(7)
PAYLOADS = [payload_of(key) for key in KEYS]
MAC = ValueMac(b"m" * 32)
INTEGERS = (b"-1", b"-0", b"-2", b"0", b"1", b"255", b"256", b"2147483648", b"4294967296", b"4503599627370496",
            b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"18446744073709551615",
            b"99999999999999999999", b"+5256", b"05256", b" 5256", b"5256 ", b"0x10", b"", b"1e3",
            b"\xd9\xa1")  # fmt: skip
LINES = (b"+OK", b"+", b"-", b"-ERR no", b"-OOM full", b"-MOVED 1 127.0.0.1:1", b"-ASK 1 :2", b"-WRONGTYPE it",
         b"-LOADING", b"-READONLY you", b"-NOAUTH", b"_", b"#t", b",1.5", b"%1", b"~2", b"*0", b"*-1", b"*2", b">0",
         b">1", b">2\r\n+a\r\n+b", b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1", b"!3\r\nabc", b"(1", b"=4\r\ntxt:", b"|1",
         b"HTTP/1.1 200 OK", b"\0", b"$", b"*", b":", b"?", b"$3\r\nabc", b"-" + b"x" * 3000)  # fmt: skip


@dataclass(frozen=True)
class Frozen:
    """Headers of both halves are made at the same time."""

    inner: Clock = SYSTEM_CLOCK

    def monotonic_s(self) -> float:
        return self.inner.monotonic_s()

    def unix_ms(self) -> int:
        return 1_700_000_000_000


WRITERS = {signed: ValueWriter(NAMESPACE, LAYOUT, Incarnation(1), StoreSettings(), Frozen(), mac)
           for signed, mac in ((False, None), (True, MAC))}  # fmt: skip
VALUES = {
    (index, signed): b"".join(
        bytes(piece) for piece in writer.block(key, (PAYLOADS[index],), exact=index % 2 == 0).pieces
    )
    for signed, writer in WRITERS.items()
    for index, key in enumerate(KEYS)
}


@dataclass(frozen=True)
class Server:
    """What one round's server sends, in which pieces, and what it does then."""

    pieces: Sequence[bytes]
    reads_first: int
    """Bytes of requests that it takes before it begins."""
    ends: str
    """`close`, `reset` or `stall`."""
    buffer_bytes: int
    """Of both ends, for what is sent: with few it goes in pieces. 0: as many as usual."""

    def serve(self, theirs: socket.socket, received: bytearray) -> None:
        with theirs, suppress(OSError):
            while len(received) < self.reads_first and (data := theirs.recv(self.reads_first - len(received))):
                received += data
            # It sends and takes at once, as a server whose client does the same must.
            sender = threading.Thread(target=self._send, args=(theirs,))
            sender.start()
            while data := theirs.recv(1 << 16):
                received += data
            sender.join()

    def _send(self, theirs: socket.socket) -> None:
        with suppress(OSError):
            for piece in self.pieces:
                theirs.sendall(piece)
            if self.ends != "stall":
                theirs.shutdown(socket.SHUT_WR if self.ends == "close" else socket.SHUT_RDWR)


def draw_server(draw: Random, replies: list[bytes], *, writing: bool) -> Server:
    stream = bytearray(b"".join(replies))
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 5))):
        _damage(draw, stream)
    cuts = sorted(draw.randrange(len(stream) + 1) for _ in range(draw.choice((0, 0, 1, 3, 12, 40))))
    pieces = [bytes(stream[start:end]) for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    if draw.random() < 0.1:  # byte by byte, around somewhere
        at = draw.randrange(len(stream) + 1)
        near = stream[at : at + 300]
        pieces = [bytes(stream[:at]), *(bytes([byte]) for byte in near), bytes(stream[at + 300 :])]
    ends = draw.choices(("close", "stall", "reset"), (6, 2, 1))[0]
    # No more than one request has: the client does not always send the next one before an answer.
    first = draw.choice((0, 0, 1, 50, 5000 if writing else 0))
    return Server([piece for piece in pieces if piece], first, ends, draw.choice((0, 0, 2048, 16384)))


def _damage(draw: Random, stream: bytearray) -> None:
    at, count = draw.randrange(len(stream) + 1), draw.choice((1, 1, 2, 7, 300, 6000))
    if draw.random() < 0.5:  # where a reply begins or ends, rather than inside a value
        at = draw.choice([at, *(place for place in range(len(stream)) if stream.startswith((b"\r\n", b"$"), place))])
    match draw.randrange(5):
        case 0:
            stream[at : at + 1] = bytes([draw.randrange(256)])
        case 1:
            del stream[at : at + count]
        case 2:
            stream[at:at] = draw.choice((draw.randbytes(count), b"\r\n", draw.choice(LINES) + b"\r\n"))
        case 3:
            stream[at:at] = stream[at : at + count]
        case _:
            del stream[at:]


def draw_read_replies(draw: Random, *, signed: bool) -> list[bytes]:
    replies: list[bytes] = []
    for index in range(len(KEYS)):
        value, kind = VALUES[index, signed], draw.random()
        if kind < 0.7:
            replies.append(b"$%d\r\n%b\r\n" % (len(value), value))
        elif kind < 0.76:
            other = VALUES[draw.randrange(len(KEYS)), draw.random() < 0.5]
            replies.append(b"$%d\r\n%b\r\n" % (len(other), other))
        elif kind < 0.8:
            cut = value[: draw.choice((0, 1, 255, 256, 257, 320, 321, len(value) - 1))]
            replies.append(b"$%d\r\n%b\r\n" % (len(cut), cut))
        elif kind < 0.88:
            replies.append(b"$%b\r\n%b\r\n" % (draw.choice(INTEGERS), value[: draw.choice((0, 1, len(value)))]))
        elif kind < 0.92:
            replies.append(draw.choice((b"$-1\r\n", b"_\r\n")))
        else:
            replies.append(draw.choice(LINES) + b"\r\n")
    return replies


def draw_write_replies(draw: Random) -> list[bytes]:
    usual = (b"+OK\r\n", b"+OK\r\n", b"$-1\r\n", b"_\r\n")
    return [draw.choice(usual) if draw.random() < 0.85 else draw.choice(LINES) + b"\r\n" for _ in KEYS]
