"""One batch over one connection: its commands go out a few values ahead of its answers, answers go where they belong.

Flight ──▶ server ──▶ values of the foreseen length: straight into place, without the interpreter ──▶ judged
                      └─▶ whatever else was answered (null, error, another length): one reply at a time
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from whalepod.core.clock import Deadline

from . import metrics
from .faults import ErrorReply, FaultReason, Meaning, StoreFault, code_label, meaning_of, raise_if_server_wide
from .native_reads import Arrived, Foreseen, Verdict
from .native_writes import NATIVE_WRITES, Sending
from .resp import Reply, RespConnection, command
from .slot_map import Redirection
from .transport import ValueSink, ValueToWrite
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
ASKING = command(b"ASKING")


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
    connection: RespConnection,
    batch: Batch,
    values: Sequence[ValueToWrite],
    starts: Sequence[bytes],
    ends: Sequence[bytes],
    *,
    deadline: Deadline,
) -> Iterator[Reply]:
    """The replies to commands of a start, a value and an end, in order; each is sent when enough of those before it
    have been answered. Raises StoreFault.

    The start of a command goes out with the rest of the one before: a server that knows what comes receives it in
    place, one that finds all of it in its buffer moves it once more.
    """
    ahead = max(1, IN_FLIGHT_BYTES // max(1, values[0].value_bytes))
    if NATIVE_WRITES is None or batch.asking or not all(value.has_draft for value in values):
        yield from _written_by_python(connection, batch, values, starts, ends, ahead=ahead, deadline=deadline)
        return
    with closing(Sending(NATIVE_WRITES, values, starts, ends, ahead=ahead)) as sending:
        while sending.answered < len(values):
            acknowledged = connection.write_values(sending, deadline=deadline)
            for stored in acknowledged.stored:
                yield b"OK" if stored else None
            if acknowledged.fault is not None:
                raise acknowledged.fault
            if sending.expects_another:
                sending.note_other_answer()
                yield connection.read_reply(deadline=deadline)


def _written_by_python(
    connection: RespConnection,
    batch: Batch,
    values: Sequence[ValueToWrite],
    starts: Sequence[bytes],
    ends: Sequence[bytes],
    *,
    ahead: int,
    deadline: Deadline,
) -> Iterator[Reply]:
    prefix = ASKING if batch.asking else b""
    connection.send([prefix + starts[0]], deadline=deadline)
    sent, count = 0, len(values)
    for done in range(count):
        while sent < min(count, done + ahead):
            following = [prefix + starts[sent + 1]] if sent + 1 < count else []
            connection.send([*values[sent].pieces, ends[sent], *following], deadline=deadline)
            sent += 1
        if sent < count:
            _ = values[sent].pieces  # while the server is busy
        batch.skip_asking(connection, deadline)
        yield connection.read_reply(deadline=deadline)


class Flight:
    """Sends requests in order, so many ahead of the answers as is good for the connection, one at least."""

    def __init__(
        self,
        connection: RespConnection,
        requests: Sequence[bytes],
        *,
        item_bytes: int,
        deadline: Deadline,
        alone: bool = False,
    ) -> None:
        """`item_bytes`: of one value, about. `alone`: values come over no other connection."""
        self._connection = connection
        self._requests = requests
        self._deadline = deadline
        in_flight = max(1, IN_FLIGHT_BYTES // max(1, item_bytes))
        self._ahead = LOCAL_AHEAD if connection.is_local else in_flight
        self._early = alone or not connection.is_local
        self._sent = 0

    def proceed(self, done: int) -> None:
        """Send what may be on its way once `done` requests have been answered. Raises StoreFault."""
        until = min(len(self._requests), done + self._ahead)
        if self._sent < until and self._sent - done <= self._ahead // 2:
            self._connection.send([b"".join(self._requests[self._sent : until])], deadline=self._deadline)
            self._sent = until

    def proceed_early(self, done: int) -> None:
        """The same once reply number `done`, counted from 1, has begun."""
        if self._early:
            self.proceed(done)

    def receive(self, done: int, values: Sequence[Foreseen]) -> Arrived | None:
        """The values that arrive as foreseen after `done`. None: the native half was not built."""
        requests = self._requests[done : done + len(values)]
        arrived = self._connection.read_values(
            values,
            requests,
            sent=self._sent - done,
            ahead=self._ahead,
            early=self._early,
            deadline=self._deadline,
        )
        if arrived is not None:
            self._sent = done + arrived.sent
        return arrived


def read_values(
    connection: RespConnection,
    batch: Batch,
    sinks: Sequence[ValueSink],
    answered: list[bool],
    flight: Flight,
    *,
    deadline: Deadline,
) -> int:
    """Take the values of `batch` into their sinks; marks in `answered` whose server said yes or no. Bytes read.

    Raises StoreFault; what had arrived before it is in place and judged.
    """
    moved = done = 0
    while done < len(batch.items):
        flight.proceed(done)  # the server begins while the rest is being prepared
        left = batch.items[done:]
        foreseen = [] if batch.asking else _foreseen([sinks[item] for item in left])
        arrived = flight.receive(done, foreseen) if foreseen else None
        if arrived is not None:
            for number, (item, verdict) in enumerate(zip(left, arrived.verdicts, strict=False)):
                sink = sinks[item]
                if not verdict or not sink.take(exact=verdict == Verdict.EXACT):
                    _judge(sink, foreseen, arrived, number)
                answered[item] = True
            moved += sum([places.head_bytes + len(places.payload) for places in foreseen[: arrived.whole]])
            done += arrived.whole
            if arrived.fault is not None:
                raise arrived.fault
        if done < len(batch.items):
            flight.proceed(done)
            done += 1
            moved += _take_any(connection, batch, done, sinks, answered, flight, deadline)
    return moved


def _foreseen(sinks: Sequence[ValueSink]) -> list[Foreseen]:
    """Of the leading sinks that foresee a length."""
    places: list[Foreseen] = []
    for sink in sinks:
        place = sink.foresee()
        if place is None:
            break
        places.append(place)
    return places


def _judge(sink: ValueSink, foreseen: Sequence[Foreseen], arrived: Arrived, number: int) -> None:
    """A whole value has been received as foreseen, and the C half does not say what it is."""
    places = foreseen[number]
    value_bytes = places.head_bytes + len(places.payload)
    head_at = sum(before.head_bytes for before in foreseen[:number])
    head = arrived.heads[head_at : head_at + places.head_bytes]
    opened = sink.open(bytes(head[:HEADER_BYTES]), value_bytes)
    if opened is not None:
        assert sum(map(len, opened)) == value_bytes - HEADER_BYTES, "a sink opened for another length"
        if len(head) > HEADER_BYTES:
            opened[0][:] = head[HEADER_BYTES:]
        sink.finish(payload_hash=arrived.payload_hashes[number])


def _take_any(
    connection: RespConnection,
    batch: Batch,
    done: int,
    sinks: Sequence[ValueSink],
    answered: list[bool],
    flight: Flight,
    deadline: Deadline,
) -> int:
    """One reply, whatever it is, with which `done` have been taken. Bytes of its value."""
    item = batch.items[done - 1]
    batch.skip_asking(connection, deadline)
    length = connection.read_value_length(deadline=deadline)
    flight.proceed_early(done)
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
        rest = length - len(head)
        if rest > DRAIN_BYTES_MAX:
            raise StoreFault(FaultReason.OVERSIZE)
        connection.skip(rest, deadline=deadline)
        connection.end_value(deadline=deadline)
        return length
    assert sum(len(place) for place in places) == length - len(head), "a sink opened for another length"
    for place in places:
        connection.read_into(place, deadline=deadline)
    connection.end_value(deadline=deadline)
    sink.finish()
    return length


def judged(reply: Reply) -> Reply:
    """The reply, its error counted. Raises StoreFault if the error is the whole server's."""
    if isinstance(reply, ErrorReply):
        metrics.ERRORS.labels(code_label(reply)).inc()
        if meaning_of(reply) is Meaning.BUG:
            logger.error("store: %s %s", reply.code, reply.message)
        raise_if_server_wide(reply)
    return reply
