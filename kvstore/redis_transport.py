"""Values in and out of one or many Redis servers, in pipelined batches that each end by their deadline.

A key's tag (`store_keys.shard_tag`) picks its server by rendezvous hashing: adding one server of n moves 1/n of the
tags and no others. A batch holds keys of one server. What the store does not answer is `None` or `UNKNOWN`, never an
exception.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

import xxhash

from whalepod.core.clock import Clock, Deadline

from . import metrics
from .faults import ErrorReply, FaultReason, Meaning, StoreFault, code_label, meaning_of, raise_if_server_wide
from .redis_shard import Lane, Shard
from .resp import Reply, RespConnection, command, gather
from .scripts import DELETE_IF, RENEW, REPLACE_IF, ScriptCall
from .settings import StoreSettings
from .store_keys import shard_tag
from .value_format import HEADER_BYTES, BytesLike

logger = logging.getLogger(__name__)

DRAIN_BYTES_MAX = 4 << 20
"""More than this is not read to be thrown away: the connection is closed instead."""


class ValueSink(Protocol):
    """Where one value goes. One thread calls `open` once if the value exists, then `finish` if it was taken."""

    @property
    def key(self) -> bytes: ...

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        """Judge the value's first bytes (256, or all of a shorter one); returns where the rest goes, None to refuse
        it."""
        ...

    def finish(self) -> None:
        """The rest is in place."""
        ...


@dataclass(frozen=True, slots=True)
class ValueToWrite:
    """One value as pieces that follow each other. `life_ms`: how long the store should keep it."""

    key: bytes
    pieces: tuple[BytesLike, ...]
    life_ms: int

    @property
    def value_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)


class Written(Enum):
    STORED = "stored"
    PRESENT = "present"
    """Somebody's value is there already."""
    DROPPED = "dropped"
    """The server answered no."""
    UNKNOWN = "unknown"
    """No answer. It may or may not be there, which is harmless: names are content."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The life one key should have at least."""

    key: bytes
    life_ms: int


class RedisTransport:
    """Thread-safe. `jitter` spreads the reconnects of many processes."""

    def __init__(self, settings: StoreSettings, *, jitter: Random, clock: Clock) -> None:
        self._settings = settings
        self.shards = tuple(
            Shard(address, settings, jitter=Random(jitter.getrandbits(64)), clock=clock)
            for address in settings.addresses
        )

    def shard_of(self, key: bytes) -> Shard:
        """Needs at least one server."""
        tag = shard_tag(key)
        return max(self.shards, key=lambda shard: xxhash.xxh3_64_intdigest(shard.name.encode() + b"\0" + tag))

    def exists(self, shard: Shard, keys: Sequence[bytes], *, deadline: Deadline) -> list[bool] | None:
        """Whether each key is there, in one round trip. None: the server did not say."""

        def talk(connection: RespConnection, deadline: Deadline) -> list[bool] | None:
            connection.send([b"".join(command(b"EXISTS", key) for key in keys)], deadline=deadline)
            replies = [_judged(connection.read_reply(deadline=deadline)) for _ in keys]
            return (
                None if any(isinstance(reply, ErrorReply) for reply in replies) else [reply == 1 for reply in replies]
            )

        return shard.exchange(Lane.CONTROL, talk, deadline=deadline)

    def read(
        self,
        shard: Shard,
        sinks: Sequence[ValueSink],
        *,
        value_bytes: int,
        renewals: Sequence[Renewal] = (),
        deadline: Deadline,
    ) -> bool:
        """Read one batch into its sinks; True if the server answered for every key. `value_bytes`: about how much in
        total.

        `renewals` (keys of the same batch) travel in the same round trip.
        """

        def talk(connection: RespConnection, deadline: Deadline) -> bool:
            request: list[BytesLike] = [b"".join(command(b"GET", sink.key) for sink in sinks)]
            renewal = _renewal(renewals)
            if renewals:
                request += renewal.pieces()
            connection.send(request, deadline=deadline)
            answered = [_read_value(connection, sink, deadline) for sink in sinks]
            if renewals:
                _settle(connection, renewal, deadline)
            return all(answered)

        return shard.exchange(Lane.DATA, talk, deadline=deadline, value_bytes=value_bytes) or False

    def write(
        self, shard: Shard, values: Sequence[ValueToWrite], *, only_if_absent: bool, deadline: Deadline
    ) -> list[Written]:
        """Write one batch; one outcome a value."""
        outcomes = [Written.UNKNOWN] * len(values)

        def talk(connection: RespConnection, deadline: Deadline) -> None:
            pieces: list[BytesLike] = []
            for value in values:
                pieces += _set_command(value, only_if_absent=only_if_absent)
            connection.send(pieces, deadline=deadline)
            for index in range(len(values)):
                outcomes[index] = _written(connection.read_reply(deadline=deadline))

        total = sum(value.value_bytes for value in values)
        shard.exchange(Lane.DATA, talk, deadline=deadline, value_bytes=total)
        return outcomes

    def heads(self, shard: Shard, keys: Sequence[bytes], *, deadline: Deadline) -> list[bytes] | None:
        """The first 256 bytes of each value (empty: not there). None: the server did not say."""

        def talk(connection: RespConnection, deadline: Deadline) -> list[bytes] | None:
            last = b"%d" % (HEADER_BYTES - 1)
            connection.send([b"".join(command(b"GETRANGE", key, b"0", last) for key in keys)], deadline=deadline)
            replies = [_judged(connection.read_reply(deadline=deadline)) for _ in keys]
            return [reply if isinstance(reply, bytes) else b"" for reply in replies]

        return shard.exchange(Lane.CONTROL, talk, deadline=deadline)

    def replace_if(self, shard: Shard, value: ValueToWrite, *, head: bytes, deadline: Deadline) -> bool:
        """Overwrite the value that still begins with `head`; True if it was that one."""
        call = ScriptCall(REPLACE_IF, [value.key], [head, value.pieces, b"%d" % value.life_ms])
        return self._run(shard, Lane.DATA, call, deadline, value_bytes=value.value_bytes) == 1

    def delete_if(self, shard: Shard, key: bytes, *, head: bytes, value_bytes: int, deadline: Deadline) -> bool:
        """Remove the value that begins with `head` and has this length, and no other; True if it was that one."""
        call = ScriptCall(DELETE_IF, [key], [head, b"%d" % value_bytes])
        return self._run(shard, Lane.CONTROL, call, deadline) == 1

    def renew(self, shard: Shard, renewals: Sequence[Renewal], *, deadline: Deadline) -> bool:
        """Lengthen lives, never shorten one; False if the server did not do it."""
        return isinstance(self._run(shard, Lane.CONTROL, _renewal(renewals), deadline), int)

    def unlink(self, shard: Shard, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        """Keys removed, as far as the server has answered."""

        def talk(connection: RespConnection, deadline: Deadline) -> int:
            connection.send([b"".join(command(b"UNLINK", key) for key in keys)], deadline=deadline)
            return sum(_judged(connection.read_reply(deadline=deadline)) == 1 for _ in keys)

        return shard.exchange(Lane.CONTROL, talk, deadline=deadline) or 0

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def _run(self, shard: Shard, lane: Lane, call: ScriptCall, deadline: Deadline, *, value_bytes: int = 0) -> Reply:
        def talk(connection: RespConnection, deadline: Deadline) -> Reply:
            connection.send(call.pieces(), deadline=deadline)
            return _settle(connection, call, deadline)

        return shard.exchange(lane, talk, deadline=deadline, value_bytes=value_bytes)


def _read_value(connection: RespConnection, sink: ValueSink, deadline: Deadline) -> bool:
    length = connection.read_value_length(deadline=deadline)
    if isinstance(length, ErrorReply):
        _judged(length)
        return False
    if length is None:
        return True
    head = connection.read_bytes(min(length, HEADER_BYTES), deadline=deadline)
    places = sink.open(head, length)
    if places is None:
        rest = length - len(head)
        if rest > DRAIN_BYTES_MAX:
            raise StoreFault(FaultReason.OVERSIZE)
        connection.skip(rest, deadline=deadline)
        connection.end_value(deadline=deadline)
        return True
    assert sum(len(place) for place in places) == length - len(head), "a sink opened for another length"
    for place in places:
        connection.read_into(place, deadline=deadline)
    connection.end_value(deadline=deadline)
    sink.finish()
    return True


def _settle(connection: RespConnection, call: ScriptCall, deadline: Deadline) -> Reply:
    """The reply to a call that was sent; a server that does not know the script yet gets its source, once."""
    reply = connection.read_reply(deadline=deadline)
    if isinstance(reply, ErrorReply) and meaning_of(reply) is Meaning.NO_SCRIPT:
        connection.send(call.pieces(by_source=True), deadline=deadline)
        reply = connection.read_reply(deadline=deadline)
    if isinstance(reply, ErrorReply) and reply.code == "NOPERM":
        # Without scripts lives are not renewed and corrupt values wait for their end: no reason to lose the store.
        metrics.ERRORS.labels(code_label(reply)).inc()
        return reply
    return _judged(reply)


def _judged(reply: Reply) -> Reply:
    """The reply, its error counted. Raises StoreFault if the error is the whole server's."""
    if isinstance(reply, ErrorReply):
        metrics.ERRORS.labels(code_label(reply)).inc()
        if meaning_of(reply) is Meaning.BUG:
            logger.error("store: %s %s", reply.code, reply.message)
        raise_if_server_wide(reply)
    return reply


def _renewal(renewals: Sequence[Renewal]) -> ScriptCall:
    return ScriptCall(RENEW, [item.key for item in renewals], [b"%d" % item.life_ms for item in renewals])


def _set_command(value: ValueToWrite, *, only_if_absent: bool) -> list[BytesLike]:
    words = (b"NX", b"PX") if only_if_absent else (b"PX",)
    return gather(b"SET", value.key, value.pieces, *words, b"%d" % value.life_ms)


def _written(reply: Reply) -> Written:
    if isinstance(_judged(reply), ErrorReply):
        return Written.DROPPED
    return Written.PRESENT if reply is None else Written.STORED
