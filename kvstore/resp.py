"""One connection that speaks RESP2, with a deadline on every call and values received straight into place.

    send([head, header, payload, …]) ──▶ server ──▶ read_reply() | read_value_length(), read_into(view), end_value()

Any doubt (timeout, end of stream, bytes that are not RESP) raises `StoreFault`; the owner then closes the connection,
so a reply that comes late can never answer the next question. Nulls are understood in RESP2 and RESP3 form, push
messages are skipped, at every position of a pipeline.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Final

from whalepod.core.clock import Deadline

from .faults import ErrorReply, FaultReason, StoreFault
from .native_library import ReadAhead
from .native_reads import Reading
from .settings import StoreAddress
from .value_format import BytesLike

Reply = int | bytes | ErrorReply | list["Reply"] | None

READ_AHEAD_BYTES: Final = 2048
"""Read at once when a line is awaited. What belongs to a value is copied from here, so it should be small."""
ERROR_CHARS_MAX: Final = 200
"""Of an error's message; it goes into logs, and a server may say anything."""
LINE_BYTES_MAX: Final = 16 << 10
SMALL_BULK_BYTES_MAX: Final = 1 << 20
ARRAY_ITEMS_MAX: Final = 1 << 16
NESTING_MAX: Final = 4
SCRATCH_BYTES: Final = 64 << 10
IOV_MAX: Final = 512
WAIT_S_MAX: Final = 3600.0


def command(*words: BytesLike) -> bytes:
    """One command in one piece."""
    return b"".join(gather(*words))


def gather(*words: BytesLike | tuple[BytesLike, ...]) -> list[BytesLike]:
    """One command as pieces for a gather write. A word given as a tuple is one word whose pieces are not copied."""
    pieces: list[BytesLike] = []
    small: list[BytesLike] = [b"*%d\r\n" % len(words)]
    for word in words:
        if isinstance(word, tuple):
            small.append(b"$%d\r\n" % sum(len(piece) for piece in word))
            pieces += (b"".join(small), *word)
            small = [b"\r\n"]
        else:
            small += (b"$%d\r\n" % len(word), word, b"\r\n")
    return [*pieces, b"".join(small)]


class RespConnection:
    """A connected socket and the bytes read ahead. Not thread-safe: one exchange at a time."""

    __slots__ = ("_ahead", "_end", "_readable", "_socket", "_start", "address")

    def __init__(self, connected: socket.socket, address: StoreAddress | None = None) -> None:
        """`address`: where it leads, for its owner."""
        self.address = address
        # Blocking mode is for the native half, where one system call receives a whole value. Here none blocks: Python
        # takes up one that a signal has interrupted, and the kernel would count its timeout from the start again.
        connected.settimeout(None)
        self._socket = connected
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._ahead = bytearray(READ_AHEAD_BYTES)
        self._start = 0
        self._end = 0

    @classmethod
    def connect(cls, address: StoreAddress, *, deadline: Deadline) -> RespConnection:
        """Resolves names without a deadline: call it from a thread that nobody waits for. Raises StoreFault."""
        timeout_s = deadline.remaining_s() or 1e-3
        try:
            if address.path:
                connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    connected.settimeout(timeout_s)
                    connected.connect(address.path)
                except OSError:
                    connected.close()
                    raise
            else:
                connected = socket.create_connection((address.host, address.port), timeout=timeout_s)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if address.is_local:
                    _send_unpaced(connected)
        except OSError as error:
            raise StoreFault(FaultReason.CONNECT, str(error)) from error
        return cls(connected, address)

    @property
    def is_local(self) -> bool:
        """It leads to this machine, as far as is known."""
        return self.address is not None and self.address.is_local

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    @property
    def quiet(self) -> bool:
        """Nothing is waiting to be read and the peer has not closed: fit for another question."""
        return self._start == self._end and self._socket.fileno() >= 0 and not self._readable.poll(0)

    def send(self, pieces: Sequence[BytesLike], *, deadline: Deadline) -> None:
        """Gather write of all pieces. Raises StoreFault."""
        views = [memoryview(piece) for piece in pieces if len(piece)]
        at = 0
        while at < len(views):
            try:
                sent = self._socket.sendmsg(views[at : at + IOV_MAX], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise StoreFault(FaultReason.RESET, str(error)) from error
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]

    def read_reply(self, *, deadline: Deadline) -> Reply:
        """Any reply, whole. Bulk strings up to 1 MiB: values go through `read_value_length`. Raises StoreFault."""
        return self._read_typed(self._next_line(deadline, nesting=0), deadline, nesting=0)

    def read_value_length(self, *, deadline: Deadline) -> int | ErrorReply | None:
        """Bytes of a bulk string that follows, None for a null, or the error. Raises StoreFault."""
        line = self._next_line(deadline, nesting=0)
        if line[:1] == b"$":
            return _length(line[1:])
        reply = self._read_typed(line, deadline, nesting=0)
        if isinstance(reply, ErrorReply) or reply is None:
            return reply
        raise StoreFault(FaultReason.PROTOCOL, "a value was expected")

    def read_values(self, reading: Reading, *, sent: int, deadline: Deadline) -> StoreFault | None:
        """Ask for what is left of a batch, of which `sent` requests are on their way, and receive it. What put the
        connection in doubt.

        If all went well and not all are there, the next reply is another one: `read_value_length` tells.
        """
        read_ahead = (self._ahead, self._start, self._end)
        arrived = reading.proceed(self._socket.fileno(), read_ahead, sent=sent, timeout_s=deadline.remaining_s())
        self._start, self._end = arrived.start, arrived.end
        return arrived.fault

    def lend(self) -> ReadAhead:
        """For the C halves to send and receive; `take_back` before anything else is done with it."""
        return ReadAhead(self._socket.fileno(), self._ahead, self._start, self._end)

    def take_back(self, lent: ReadAhead) -> None:
        self._start, self._end = lent.start, lent.end

    def read_into(self, view: memoryview, *, deadline: Deadline) -> None:
        """Fill all of `view` (one-dimensional bytes) with what comes next. Raises StoreFault."""
        ahead = min(len(view), self._end - self._start)
        if ahead:
            view[:ahead] = memoryview(self._ahead)[self._start : self._start + ahead]
            self._start += ahead
        at = ahead
        while at < len(view):
            at += self._receive(view[at:] if at else view, deadline)

    def read_bytes(self, length: int, *, deadline: Deadline) -> bytes:
        """The next `length` bytes, a few hundred at most. Raises StoreFault."""
        while self._end - self._start < length:
            self._read_ahead(deadline)
        self._start += length
        return bytes(self._ahead[self._start - length : self._start])

    def skip(self, length: int, *, deadline: Deadline) -> None:
        """Read and forget. Raises StoreFault."""
        scratch = memoryview(bytearray(min(length, SCRATCH_BYTES)))
        while length > 0:
            step = min(length, SCRATCH_BYTES)
            self.read_into(scratch[:step], deadline=deadline)
            length -= step

    def end_value(self, *, deadline: Deadline) -> None:
        """The line end after a bulk string. Raises StoreFault."""
        while self._end - self._start < 2:
            self._read_ahead(deadline)
        if not self._ahead.startswith(b"\r\n", self._start):
            raise StoreFault(FaultReason.PROTOCOL, "a value is longer than announced")
        self._start += 2

    def _read_typed(self, line: bytes, deadline: Deadline, *, nesting: int) -> Reply:
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply.parse(rest.decode("utf-8", "replace"), chars_max=ERROR_CHARS_MAX)
        if kind == b":":
            return _integer(rest)
        if kind == b"_":
            return None
        if kind == b"$":
            return self._read_small_bulk(_length(rest), deadline)
        if kind == b"*":
            count = _length(rest)
            return None if count is None else self._read_items(count, deadline, nesting)
        raise StoreFault(FaultReason.PROTOCOL, "an unknown type of reply")

    def _read_small_bulk(self, length: int | None, deadline: Deadline) -> bytes | None:
        if length is None:
            return None
        if length > SMALL_BULK_BYTES_MAX:
            raise StoreFault(FaultReason.PROTOCOL, "a reply is too long")
        data = bytearray(length)
        self.read_into(memoryview(data), deadline=deadline)
        self.end_value(deadline=deadline)
        return bytes(data)

    def _read_items(self, count: int, deadline: Deadline, nesting: int) -> list[Reply]:
        if count > ARRAY_ITEMS_MAX or nesting >= NESTING_MAX:
            raise StoreFault(FaultReason.PROTOCOL, "a reply is too large")
        deeper = nesting + 1
        return [
            self._read_typed(self._next_line(deadline, nesting=deeper), deadline, nesting=deeper) for _ in range(count)
        ]

    def _next_line(self, deadline: Deadline, *, nesting: int) -> bytes:
        """The first line of the next reply. Push messages before it are nobody's answer."""
        line = self._read_line(deadline)
        while line[:1] == b">":
            self._read_items(_length(line[1:]) or 0, deadline, nesting)
            line = self._read_line(deadline)
        return line

    def _read_line(self, deadline: Deadline) -> bytes:
        searched = self._start
        while True:
            found = self._ahead.find(b"\r\n", searched, self._end)
            if found >= 0:
                line = bytes(self._ahead[self._start : found])
                self._start = found + 2
                return line
            if self._end - self._start > LINE_BYTES_MAX:
                raise StoreFault(FaultReason.PROTOCOL, "a line is too long")
            seen = self._end - self._start
            self._read_ahead(deadline)
            searched = self._start + max(0, seen - 1)

    def _read_ahead(self, deadline: Deadline) -> None:
        """Append what is there to the bytes read ahead, at least one byte."""
        if self._start:
            self._ahead[: self._end - self._start] = self._ahead[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        if self._end == len(self._ahead):
            self._ahead.extend(bytes(READ_AHEAD_BYTES))
        self._end += self._receive(memoryview(self._ahead)[self._end :], deadline)

    def _receive(self, view: memoryview, deadline: Deadline) -> int:
        while True:
            self._wait(select.POLLIN, deadline)
            try:
                received = self._socket.recv_into(view, len(view), socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise StoreFault(FaultReason.RESET, str(error)) from error
            if not received:
                raise StoreFault(FaultReason.RESET, "the server closed the connection")
            return received

    def _wait(self, event: int, deadline: Deadline) -> None:
        """Until there is something to receive, or room to send."""
        remaining_s = deadline.remaining_s()
        if remaining_s <= 0:
            raise StoreFault(FaultReason.TIMEOUT, "deadline")
        waiting = select.poll()
        try:
            waiting.register(self._socket, event)
        except ValueError as error:  # closed under us
            raise StoreFault(FaultReason.RESET, str(error)) from error
        if not waiting.poll(1000 * min(remaining_s, WAIT_S_MAX)):
            raise StoreFault(FaultReason.TIMEOUT, "send" if event == select.POLLOUT else "receive")


def _send_unpaced(connected: socket.socket) -> None:
    """Nothing is congested within a machine: a congestion control that spaces out what it sends (BBR) only delays."""
    with contextlib.suppress(AttributeError, OSError):  # another system than Linux; a kernel without it
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _length(digits: bytes) -> int | None:
    """None: -1, which stands for a null. Raises StoreFault."""
    length = _integer(digits)
    if length < -1:
        raise StoreFault(FaultReason.PROTOCOL, "a length is negative")
    return None if length < 0 else length


def _integer(digits: bytes) -> int:
    """Raises StoreFault unless `digits` is an optional minus sign and up to 18 ASCII digits."""
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 19:
        raise StoreFault(FaultReason.PROTOCOL, "a number was expected")
    return int(digits)
