"""Values in and out of one or many Redis servers, in pipelined batches that each end by their deadline.

A key's tag (`store_keys.shard_tag`) picks its server. Servers of their own share the tags by rendezvous hashing: adding
one of n moves 1/n of the tags and no others. The nodes of a Redis Cluster say which of them has what (`topology.py`);
their redirections are followed within the deadline. What the store does not answer is `None` or `UNKNOWN`, never an
exception.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random

from whalepod.core.clock import Clock, Deadline

from . import metrics
from .asked_values import AskedOver
from .columns import rows
from .faults import ErrorReply, FaultReason, Meaning, StoreFault, code_label, meaning_of
from .native_reads import Requests
from .native_writes import LANES_MAX
from .pipeline import ASKING, Batch, Flight, judged, read_values, write_values
from .redis_shard import Greeting, Lane, Lease, Shard
from .resp import Reply, RespConnection, command
from .scripts import DELETE_IF, RENEW, REPLACE_IF, ScriptCall
from .settings import StoreSettings
from .slot_map import Redirection
from .store_keys import shard_tag
from .topology import Topology
from .transport import Place, Renewal, ValueSinks, ValuesToWrite, ValueToWrite, Written
from .value_format import HEADER_BYTES

logger = logging.getLogger(__name__)

HOPS_MAX = 3
"""Servers asked about one item at most: the first, and those it leads to."""


Talk = Callable[[Sequence[RespConnection], Deadline, Batch], None]
"""Over one connection, or as many as it was asked for and are idle."""


class RedisTransport:
    """Thread-safe. `jitter` spreads the reconnects of many processes."""

    def __init__(self, settings: StoreSettings, *, jitter: Random, clock: Clock, greet: Greeting | None = None) -> None:
        """`greet` is what a new connection says first."""
        self._clock = clock
        self._strange_told = False
        self._data_connections = settings.data_connections
        self._topology = Topology(settings, jitter=jitter, clock=clock, greet=greet)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._topology.shards

    def shard_of(self, key: bytes) -> Shard:
        """Needs at least one server."""
        return self._topology.shard_of(key)

    def exists(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bool] | None:
        """In one round trip."""
        answers: list[Reply] = [None] * len(keys)
        commands = [command(b"EXISTS", key) for key in keys]

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            connection = connections[0]
            connection.send(batch.pipeline(commands), deadline=deadline)
            for item in batch.items:
                batch.skip_asking(connection, deadline)
                answers[item] = batch.judged(item, connection.read_reply(deadline=deadline))

        self._ask(shard, Lane.CONTROL, keys, talk, deadline=deadline)
        return [answer == 1 for answer in answers] if all(isinstance(answer, int) for answer in answers) else None

    def ask(self, keys: Sequence[bytes]) -> AskedOver | None:
        shard = self.shard_of(keys[0])
        lease = shard.lend(Lane.DATA)
        if lease is None:
            return None
        try:
            lease.connections[0].send([get_requests(keys).bytes], deadline=Deadline.after(0, self._clock))
        except StoreFault as fault:
            shard.drop(Lane.DATA, lease, fault)
            return None
        return AskedOver(shard, lease, keys)

    def read(
        self,
        shard: Place,
        sinks: ValueSinks,
        *,
        value_bytes: int,
        renewals: Sequence[Renewal] = (),
        deadline: Deadline,
    ) -> bool:
        """`renewals` travel in the same round trip."""
        keys = sinks.keys
        answered = bytearray(len(keys))
        calls = _renewals(renewals)
        item_bytes = value_bytes // max(1, len(keys))
        strange: set[int] = set()
        asked = sinks.asked if isinstance(sinks.asked, AskedOver) else None
        lease = asked.lease_for(shard, keys, deadline=deadline) if asked is not None else None

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            connection = connections[0]
            renew = bool(calls) and not batch.asking
            behind = b"".join([piece for call in calls for piece in call.pieces()]) if renew else b""
            requests = get_requests(rows(keys, batch.items), asking=batch.asking, behind=behind)
            flight = Flight(
                connection,
                requests,
                item_bytes=item_bytes,
                deadline=deadline,
                alone=self._topology.is_alone(connections),
            )
            if asked is not None and lease is not None and connections is lease.connections:
                flight.sent = asked.count
            began_at_s = self._clock.monotonic_s()
            moved = read_values(connection, batch, sinks, answered, flight, deadline=deadline)
            strange.update(batch.strange)
            self._topology.note_read(connection, moved, self._clock.monotonic_s() - began_at_s)
            if renew:
                replies = [connection.read_reply(deadline=deadline) for _ in calls]
                for call, reply in zip(calls, replies, strict=True):
                    _renewed(call, _settle(connection, call, reply, deadline))

        self._ask(shard, Lane.DATA, keys, talk, deadline=deadline, value_bytes=value_bytes, lease=lease)
        if strange:
            self._remove_strange(shard, [keys[item] for item in strange], deadline)
            for item in strange:
                answered[item] = True
        return False not in answered

    def _remove_strange(self, shard: Place, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Something that is no value lies where one belongs, and none could be stored there."""
        metrics.VALUES_REFUSED.labels("type").inc(len(keys))
        if not self._strange_told:
            self._strange_told = True
            logger.error("store %s: something that is no value lies under our names, and is removed", shard.name)
        self.unlink(shard, keys, deadline=deadline)

    def write(self, shard: Place, values: ValuesToWrite, *, only_if_absent: bool, deadline: Deadline) -> list[Written]:
        outcomes = [Written.UNKNOWN] * len(values.keys)

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            starts, ends = set_commands(values, batch.items, only_if_absent=only_if_absent)
            stored, present, items = Written.STORED, Written.PRESENT, batch.items
            for number, reply in write_values(connections, batch, values, starts, ends, deadline=deadline):
                item = items[number]
                if reply == b"OK":
                    outcomes[item] = stored
                elif reply is None:
                    outcomes[item] = present
                elif isinstance(reply, ErrorReply):
                    batch.judged(item, reply)
                    outcomes[item] = Written.DROPPED
                else:
                    raise StoreFault(FaultReason.PROTOCOL, "no answer to SET")

        value_bytes = len(outcomes) * values.value_bytes
        self._ask(
            shard,
            Lane.DATA,
            values.keys,
            talk,
            deadline=deadline,
            value_bytes=value_bytes,
            connections_max=min(self._data_connections, LANES_MAX, len(outcomes)) if values.can_spread else 1,
        )
        return outcomes

    def heads(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bytes] | None:
        answers: list[Reply] = [None] * len(keys)
        last = b"%d" % (HEADER_BYTES - 1)
        commands = [command(b"GETRANGE", key, b"0", last) for key in keys]

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            connection = connections[0]
            connection.send(batch.pipeline(commands), deadline=deadline)
            for item in batch.items:
                batch.skip_asking(connection, deadline)
                answers[item] = batch.judged(item, connection.read_reply(deadline=deadline))

        if not self._ask(shard, Lane.CONTROL, keys, talk, deadline=deadline):
            return None
        return [answer if isinstance(answer, bytes) else b"" for answer in answers]

    def replace_if(self, shard: Place, value: ValueToWrite, *, head: bytes, deadline: Deadline) -> bool:
        call = ScriptCall(REPLACE_IF, [value.key], [head, value.pieces, b"%d" % value.life_ms])
        return self._run(shard, Lane.DATA, call, deadline, value_bytes=value.value_bytes) == 1

    def delete_if(self, shard: Place, key: bytes, *, head: bytes, value_bytes: int, deadline: Deadline) -> bool:
        call = ScriptCall(DELETE_IF, [key], [head, b"%d" % value_bytes])
        return self._run(shard, Lane.CONTROL, call, deadline) == 1

    def renew(self, shard: Place, renewals: Sequence[Renewal], *, deadline: Deadline) -> bool:
        renewed = [self._renew(shard, call, deadline) for call in _renewals(renewals)]
        return all(renewed)

    def _renew(self, shard: Place, call: ScriptCall, deadline: Deadline) -> bool:
        reply = self._run(shard, Lane.CONTROL, call, deadline)
        if isinstance(reply, ErrorReply) and reply.code == "TRYAGAIN":
            # The slot is on its way to another node and its keys are at both: one by one each is at one.
            each = zip(call.keys, call.arguments, strict=True)
            calls = [ScriptCall(RENEW, [key], [life]) for key, life in each]
            renewed = [_renewed(call, self._run(shard, Lane.CONTROL, call, deadline)) for call in calls]
            return all(renewed)
        return _renewed(call, reply)

    def unlink(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        answers: list[Reply] = [None] * len(keys)
        commands = [command(b"UNLINK", key) for key in keys]

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            connection = connections[0]
            connection.send(batch.pipeline(commands), deadline=deadline)
            for item in batch.items:
                batch.skip_asking(connection, deadline)
                answers[item] = batch.judged(item, connection.read_reply(deadline=deadline))

        self._ask(shard, Lane.CONTROL, keys, talk, deadline=deadline)
        return sum(answer == 1 for answer in answers)

    def close(self) -> None:
        self._topology.close()

    def _ask(
        self,
        shard: Place,
        lane: Lane,
        keys: Sequence[bytes],
        talk: Talk,
        *,
        deadline: Deadline,
        value_bytes: int = 0,
        connections_max: int = 1,
        lease: Lease | None = None,
    ) -> bool:
        """Ask about every key, following the servers' redirections; True if each was answered or led somewhere."""
        pending = [(self._topology.own(shard), Batch(range(len(keys))))]
        answered = True
        for _ in range(HOPS_MAX):
            following: list[tuple[Shard, Batch]] = []
            for server, batch in pending:
                done, demoted = _exchanged(
                    server,
                    lane,
                    batch,
                    talk,
                    deadline=deadline,
                    value_bytes=value_bytes,
                    connections_max=connections_max,
                    lease=lease,
                )
                lease = None
                if demoted:
                    # The server has become a replica: its name, or the cluster, may lead to the new primary.
                    metrics.REDIRECTIONS.labels("readonly").inc()
                    self._topology.learn(deadline)
                    following.append((self._topology.shard_of(keys[batch.items[0]]), Batch(batch.items)))
                answered &= done or demoted
                following += self._led_elsewhere(server, batch)
            pending = following
            if not pending:
                return answered
        return False

    def _led_elsewhere(self, server: Shard, batch: Batch) -> list[tuple[Shard, Batch]]:
        by_target: dict[tuple[Shard, bool], list[int]] = defaultdict(list)
        if batch.elsewhere and not self._topology.is_cluster:
            logger.error("store %s is a node of a Redis Cluster: say so in the settings (store.cluster)", server.name)
            return []
        for item, redirection in batch.elsewhere.items():
            metrics.REDIRECTIONS.labels("ask" if redirection.ask else "moved").inc()
            by_target[self._topology.follow(redirection, asked=server), redirection.ask].append(item)
        return [(target, Batch(items, asking=ask)) for (target, ask), items in by_target.items()]

    def _run(self, shard: Place, lane: Lane, call: ScriptCall, deadline: Deadline, *, value_bytes: int = 0) -> Reply:
        answer: list[Reply] = [None]

        def talk(connections: Sequence[RespConnection], deadline: Deadline, batch: Batch) -> None:
            connection = connections[0]
            connection.send([*([ASKING] if batch.asking else []), *call.pieces()], deadline=deadline)
            batch.skip_asking(connection, deadline)
            reply = connection.read_reply(deadline=deadline)
            reply = _settle(connection, call, reply, deadline, asking=batch.asking)
            answer[0] = batch.judged(0, reply) if isinstance(reply, ErrorReply) and _leads(reply) else reply

        self._ask(shard, lane, call.keys[:1], talk, deadline=deadline, value_bytes=value_bytes)
        return answer[0]


def _exchanged(
    server: Shard,
    lane: Lane,
    batch: Batch,
    talk: Talk,
    *,
    deadline: Deadline,
    value_bytes: int,
    connections_max: int,
    lease: Lease | None,
) -> tuple[bool, bool]:
    """Whether the server answered, and whether it did not because it has become a replica."""
    demoted: list[StoreFault] = []

    def guarded(connections: Sequence[RespConnection], deadline: Deadline) -> bool:
        try:
            talk(connections, deadline, batch)
        except StoreFault as fault:
            if fault.reason is FaultReason.MOVED:
                demoted.append(fault)
            raise
        return True

    done = server.exchange(
        lane,
        guarded,
        deadline=deadline,
        value_bytes=value_bytes,
        connections_max=connections_max,
        lease=lease,
    )
    return done or False, bool(demoted)


def _settle(
    connection: RespConnection, call: ScriptCall, reply: Reply, deadline: Deadline, *, asking: bool = False
) -> Reply:
    """The reply to a call that was sent, with none behind it; a server that does not know the script yet gets its
    source, once."""
    if isinstance(reply, ErrorReply) and meaning_of(reply) is Meaning.NO_SCRIPT:
        connection.send([*([ASKING] if asking else []), *call.pieces(by_source=True)], deadline=deadline)
        if asking:
            judged(connection.read_reply(deadline=deadline))
        reply = connection.read_reply(deadline=deadline)
    if isinstance(reply, ErrorReply) and (reply.code == "NOPERM" or _leads(reply)):
        # Without scripts lives are not renewed and corrupt values wait for their end: no reason to lose the store.
        metrics.ERRORS.labels(code_label(reply)).inc()
        return reply
    return judged(reply)


def _leads(reply: ErrorReply) -> bool:
    return Redirection.parse(reply) is not None


def _renewed(call: ScriptCall, reply: Reply) -> bool:
    """Whether the server did it. What was left of the lives tells how long the blocks had not been used."""
    if not isinstance(reply, list):
        return False
    for life, left_ms in zip(call.arguments, reply, strict=False):
        if isinstance(life, bytes) and isinstance(left_ms, int) and 0 <= left_ms <= int(life):
            metrics.REUSE_INTERVAL_SECONDS.observe((int(life) - left_ms) / 1000)
    return True


def _renewals(renewals: Sequence[Renewal]) -> list[ScriptCall]:
    """A script looks at keys of one slot, a run's at most."""
    by_tag: dict[bytes, list[Renewal]] = defaultdict(list)
    for item in renewals:
        by_tag[shard_tag(item.key)].append(item)
    return [
        ScriptCall(RENEW, [item.key for item in items], [b"%d" % item.life_ms for item in items])
        for items in by_tag.values()
    ]


def get_requests(keys: Sequence[bytes], *, asking: bool = False, behind: bytes = b"") -> Requests:
    """A GET of each key, all of one length; `behind` goes out with the last."""
    start = (ASKING if asking else b"") + b"*2\r\n$3\r\nGET\r\n$%d\r\n" % len(keys[0])
    gets, bytes_each = start + (b"\r\n" + start).join(keys) + b"\r\n", len(start) + len(keys[0]) + 2
    assert len(gets) == len(keys) * bytes_each, "keys of one batch have one length"
    return Requests(len(keys), gets + behind, bytes_each)


def set_commands(
    values: ValuesToWrite, items: Sequence[int], *, only_if_absent: bool
) -> tuple[list[bytes], list[bytes]]:
    """What stands before and behind each of some values in its SET."""
    words, condition = (6, b"$2\r\nNX\r\n") if only_if_absent else (5, b"")
    keys = rows(values.keys, items)
    before, behind = b"*%d\r\n$3\r\nSET\r\n$%d\r\n" % (words, len(keys[0])), b"\r\n$%d\r\n" % values.value_bytes
    starts = [before + key + behind for key in keys]
    return starts, [_set_end(condition, life_ms) for life_ms in rows(values.lives_ms, items)]


@lru_cache(maxsize=8192)
def _set_end(condition: bytes, life_ms: int) -> bytes:
    """Depths and with them lives repeat."""
    life = b"%d" % life_ms
    return b"\r\n%b$2\r\nPX\r\n$%d\r\n%b\r\n" % (condition, len(life), life)
