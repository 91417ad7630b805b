"""One batch over one connection: its commands go out a few values ahead of its answers, answers go where they belong.

Flight ──▶ server ──▶ values of the foreseen length: straight into place, without the interpreter ──▶ judged
                      └─▶ whatever else was answered (null, error, another length): one reply at a time
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from whalepod.core.clock import Deadline

from . import metrics
from .columns import put_rows
from .faults import ErrorReply, FaultReason, Meaning, StoreFault, code_label, meaning_of, raise_if_server_wide
from .native_library import NATIVE, NativeLibrary
from .native_reads import Foreseen, Reading, Requests, Verdict
from .native_writes import PRESENT, STORED, Writing
from .resp import Reply, RespConnection, command
from .slot_map import Redirection
from .transport import ValueSink, ValueSinks, ValuesToWrite
from .value_format import HEADER_BYTES

logger = logging.getLogger(__name__)

DRAIN_BYTES_MAX = 4 << 20
"""More than this is not read to be thrown away: the connection is closed instead."""
IN_FLIGHT_BYTES = 1 << 20
"""Of values on their way over one connection. At a round trip of 0.1 ms that is 10 GB/s; with more, what one side has
written leaves the processor's cache before the other side of a local connection reads it, at half the speed."""
LOCAL_AHEAD = 1
"""Requests for values on their way over one connection to a server on this machine. A server that finds more than two
at once makes all their replies before it sends the first, in memory that no cache holds and that it may have to map
anew: two to four times its time a byte. So a lone connection asks for the next value when a reply begins, several when
it has ended."""
SPIN_NS = 50_000
"""How long one who is alone with a server on this machine looks for something to do before sleeping: it takes about so
long for a value, and waking a thread costs it a part of that."""
ASKING = command(b"ASKING")
_REPLIES: Mapping[int, Reply] = {STORED: b"OK", PRESENT: None}


@dataclass(slots=True)
class Batch:
    """Items of one pipeline that are still to be asked about, and where the server says that some of them are."""

    items: Sequence[int]
    asking: bool = False
    elsewhere: dict[int, Redirection] = field(default_factory=dict[int, Redirection])
    strange: list[int] = field(default_factory=list[int])
    """Items whose key holds no string: nothing that we can have written."""

    def pipeline(self, commands: Sequence[bytes]) -> list[bytes]:
        """Its part of the commands about all items."""
        asking = [ASKING] if self.asking else []
        return [each for item in self.items for each in (*asking, commands[item])]

    def judged(self, item: int, reply: Reply) -> Reply:
        """The reply, unless it is a redirection, which is kept and None instead. Raises StoreFault, see `judged`."""
        if isinstance(reply, ErrorReply) and (redirection := Redirection.parse(reply)) is not None:
            self.elsewhere[item] = redirection
            return None
        return judged(reply)

    def skip_asking(self, connection: RespConnection, deadline: Deadline) -> None:
        if self.asking:
            judged(connection.read_reply(deadline=deadline))


def write_values(
    connections: Sequence[RespConnection],
    batch: Batch,
    values: ValuesToWrite,
    starts: Sequence[bytes],
    ends: Sequence[bytes],
    *,
    deadline: Deadline,
) -> Iterator[tuple[int, Reply]]:
    """The replies to commands of a start, a value of `batch` and an end, each with the command's number; in order on
    each connection. A command is sent when enough of those before it have been answered. Raises StoreFault.

    The start of a command goes out with the rest of the one before: a server that knows what comes receives it in
    place, one that finds all of it in its buffer moves it once more.
    """
    ahead = max(1, IN_FLIGHT_BYTES // max(1, values.value_bytes))
    drafts = None if NATIVE is None or batch.asking else values.drafts(batch.items)
    if NATIVE is None or drafts is None:
        replies = _written_by_python(connections[0], batch, values, starts, ends, ahead=ahead, deadline=deadline)
        yield from enumerate(replies)
        return
    connections = connections[: len(starts)]
    local, lanes = connections[0].is_local, len(connections)
    if local and lanes > 1:
        ahead = 1
    with closing(Writing(NATIVE, drafts, starts, ends, lanes=lanes, ahead=ahead)) as writing:
        while any(map(writing.numbers, range(lanes))):
            lent = [connection.lend() for connection in connections]
            advances = writing.proceed(lent, timeout_s=deadline.remaining_s())
            for connection, each in zip(connections, lent, strict=True):
                connection.take_back(each)
            for advance in advances:
                yield from zip(advance.numbers, map(_REPLIES.get, advance.answers), strict=True)
            for advance in advances:
                if advance.fault is not None:
                    raise advance.fault
            for lane, connection in enumerate(connections):
                if numbers := writing.numbers(lane):
                    yield numbers[0], connection.read_reply(deadline=deadline)
                    writing.note_other_answer(lane)


def _written_by_python(
    connection: RespConnection,
    batch: Batch,
    values: ValuesToWrite,
    starts: Sequence[bytes],
    ends: Sequence[bytes],
    *,
    ahead: int,
    deadline: Deadline,
) -> Iterator[Reply]:
    prefix = ASKING if batch.asking else b""
    connection.send([prefix + starts[0]], deadline=deadline)
    sent, count = 0, len(starts)
    for done in range(count):
        while sent < min(count, done + ahead):
            following = [prefix + starts[sent + 1]] if sent + 1 < count else []
            connection.send([*values[batch.items[sent]].pieces, ends[sent], *following], deadline=deadline)
            sent += 1
        if sent < count:
            _ = values[batch.items[sent]].pieces  # while the server is busy
        batch.skip_asking(connection, deadline)
        yield connection.read_reply(deadline=deadline)


class Flight:
    """Sends requests in order, so many ahead of the answers as is good for the connection, one at least."""

    def __init__(
        self,
        connection: RespConnection,
        requests: Requests,
        *,
        item_bytes: int,
        deadline: Deadline,
        alone: bool = False,
    ) -> None:
        """`item_bytes`: of one value, about. `alone`: nobody else moves values to or from this server."""
        self.requests = requests
        self.ahead = LOCAL_AHEAD if connection.is_local else max(1, IN_FLIGHT_BYTES // max(1, item_bytes))
        self.spin_ns = SPIN_NS if alone and connection.is_local else 0
        self.early = alone or not connection.is_local
        """The next may be asked for when a reply has begun."""
        self.sent = 0
        self._connection = connection
        self._deadline = deadline

    def proceed(self, done: int) -> None:
        """Send what may be on its way once `done` requests have been answered. Raises StoreFault."""
        until = min(self.requests.values, done + self.ahead)
        if self.sent < until and self.sent - done <= self.ahead // 2:
            due = self.requests.bytes[self.requests.end(self.sent) : self.requests.end(until)]
            self._connection.send([due], deadline=self._deadline)
            self.sent = until


def read_values(
    connection: RespConnection,
    batch: Batch,
    sinks: ValueSinks,
    answered: bytearray,
    flight: Flight,
    *,
    deadline: Deadline,
) -> int:
    """Take the values of `batch` into their sinks; marks in `answered` whose server said yes or no. Bytes read.

    Raises StoreFault; what had arrived before it is in place and judged.
    """
    flight.proceed(0)  # the server begins while the rest is being prepared
    foreseen = None if NATIVE is None or batch.asking else sinks.foresee(batch.items)
    if NATIVE is not None and foreseen is not None:
        return _read_foreseen(NATIVE, connection, batch, sinks, answered, flight, foreseen, deadline)
    moved = 0
    for done in range(len(batch.items)):
        moved += _take_any(connection, batch, done, sinks, answered, flight, deadline)
    return moved


def _read_foreseen(
    native: NativeLibrary,
    connection: RespConnection,
    batch: Batch,
    sinks: ValueSinks,
    answered: bytearray,
    flight: Flight,
    foreseen: Foreseen,
    deadline: Deadline,
) -> int:
    moved, count = 0, len(batch.items)
    value_bytes = foreseen.head_bytes + foreseen.payload_bytes
    ahead, early, spin_ns = flight.ahead, flight.early, flight.spin_ns
    with closing(Reading(native, foreseen, flight.requests, ahead=ahead, early=early, spin_ns=spin_ns)) as reading:
        while (first := reading.done) < count:
            fault = connection.read_values(reading, sent=flight.sent, deadline=deadline)
            flight.sent = reading.sent
            items, verdicts = batch.items[first : reading.done], reading.verdicts(first)
            sinks.take(items, verdicts)
            put_rows(answered, items, b"\1" * len(items))
            for number, item in enumerate(items, first) if Verdict.NONE in verdicts else ():
                if verdicts[number - first] == Verdict.NONE:
                    _judge(sinks[item], reading, number, value_bytes)
            moved += len(items) * value_bytes
            if fault is not None:
                raise fault
            if reading.done < count:
                moved += _take_any(connection, batch, reading.done, sinks, answered, flight, deadline)
                reading.note_other_reply()
    return moved


def _judge(sink: ValueSink, reading: Reading, number: int, value_bytes: int) -> None:
    """A whole value has been received as foreseen, and the C half does not say what it is."""
    head = reading.head(number)
    opened = sink.open(head[:HEADER_BYTES], value_bytes)
    if opened is not None:
        assert sum(map(len, opened)) == value_bytes - HEADER_BYTES, "a sink opened for another length"
        if len(head) > HEADER_BYTES:
            opened[0][:] = head[HEADER_BYTES:]
        sink.finish(payload_hash=reading.payload_hashes[number])


def _take_any(
    connection: RespConnection,
    batch: Batch,
    done: int,
    sinks: ValueSinks,
    answered: bytearray,
    flight: Flight,
    deadline: Deadline,
) -> int:
    """One reply, whatever it is, before which `done` have been taken. Bytes of its value."""
    item = batch.items[done]
    flight.proceed(done)
    batch.skip_asking(connection, deadline)
    length = connection.read_value_length(deadline=deadline)
    if flight.early:
        flight.proceed(done + 1)
    if isinstance(length, ErrorReply):
        batch.judged(item, length)
        if meaning_of(length) is Meaning.STRANGE:
            batch.strange.append(item)
        return 0
    moved = 0 if length is None else _take_value(connection, sinks[item], length, deadline)
    answered[item] = True
    return moved


def _take_value(connection: RespConnection, sink: ValueSink, length: int, deadline: Deadline) -> int:
    """Read the value that follows into its sink, or past it. Bytes read."""
    head = connection.read_bytes(min(length, HEADER_BYTES), deadline=deadline)
    places = sink.open(head, length)
    if places is None:
        _skip_rest(connection, length - len(head), deadline)
        return length
    assert sum(len(place) for place in places) == length - len(head), "a sink opened for another length"
    for place in places:
        connection.read_into(place, deadline=deadline)
    connection.end_value(deadline=deadline)
    sink.finish()
    return length


def skip_value(connection: RespConnection, deadline: Deadline) -> None:
    """Read a reply that is a value, or says why it is none, and forget it. Raises StoreFault."""
    length = connection.read_value_length(deadline=deadline)
    if isinstance(length, int):
        _skip_rest(connection, length, deadline)


def _skip_rest(connection: RespConnection, rest: int, deadline: Deadline) -> None:
    if rest > DRAIN_BYTES_MAX:
        raise StoreFault(FaultReason.OVERSIZE)
    connection.skip(rest, deadline=deadline)
    connection.end_value(deadline=deadline)


def judged(reply: Reply) -> Reply:
    """The reply, its error counted. Raises StoreFault if the error is the whole server's."""
    if isinstance(reply, ErrorReply):
        metrics.ERRORS.labels(code_label(reply)).inc()
        if meaning_of(reply) is Meaning.BUG:
            logger.error("store: %s %s", reply.code, reply.message)
        raise_if_server_wide(reply)
    return reply
