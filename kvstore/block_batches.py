"""Blocks in and out of the store, in batches of one run: at most 16 blocks of one server. A few batches of a server are
moved in one exchange, so that it is not idle between them.

    fetch ──▶ BlockSink: header judged, payload in place, checksum ──▶ leading verified blocks; corrupt values removed
    put   ──▶ SET NX ──▶ renew the life of what was there, replace approximate by exact ──▶ leading blocks held

Exchanges of one call run side by side, as many as there are connections. A call returns when every one has ended.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Deadline

from . import metrics
from .held_values import HeldValues
from .missing_keys import MissingKeys
from .renewals import Renewals
from .store_keys import block_store_key
from .transport import Place, Renewal, ValueToWrite, ValueTransport, Written
from .value_format import HEADER_BYTES, BytesLike, Header, Refusal, parse_header
from .value_sinks import BlockSink, Rejected
from .value_writer import ValueWriter, flat_pieces

logger = logging.getLogger(__name__)

BATCHES_AT_ONCE = 4
"""Of one exchange. With more the server is idle less often, and another caller waits longer for a connection."""


@dataclass(frozen=True, slots=True)
class BlockToPut:
    """A block and its payload, in one piece or in pieces that follow each other; `layout.payload_bytes` in total."""

    key: BlockKey
    payload: BytesLike | Sequence[BytesLike]
    exact: bool
    owner: int = 0
    """64 bits that say on whose account it is stored (`store_keys.owner_tag`); 0: nobody's."""


@dataclass(frozen=True, slots=True)
class BatchThreads:
    """Runs jobs side by side, on `threads` of which the caller's is one."""

    executor: ThreadPoolExecutor
    threads: int

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Returns when every job that was begun has ended, also if one raises: the caller's buffers are then its own
        again. Jobs begin in order."""
        left = iter(jobs)  # of a list: threads may share it

        def work() -> None:
            for job in left:
                job()

        helpers = [helper for _ in range(min(len(jobs), self.threads) - 1) if (helper := self._started(work))]
        try:
            work()
        finally:
            for helper in helpers:
                helper.cancel()  # it waits behind other calls, and nothing is left for it
            wait(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    def _started(self, work: Callable[[], None]) -> Future[None] | None:
        """None: the threads are gone. After `close` the transport answers every job at once."""
        try:
            return self.executor.submit(work)
        except RuntimeError:
            return None


class BlockBatches:
    """Thread-safe. The transport has at least one server, or values are held here."""

    def __init__(
        self,
        transport: ValueTransport,
        writer: ValueWriter,
        *,
        renewals: Renewals | None,
        missing: MissingKeys,
        threads: BatchThreads,
        held: HeldValues | None = None,
    ) -> None:
        """`renewals` None: a hit lengthens no life. `held` keeps what is put for ranks that read it from here."""
        self._transport = transport
        self._missing = missing
        self._held = held
        self._writer = writer
        self._renewals = renewals
        self._threads = threads

    @property
    def available(self) -> bool:
        """Some server is, as far as is known."""
        return any(shard.available for shard in self._transport.shards)

    @property
    def read_bytes_per_s(self) -> float | None:
        """Of the slowest server that has been measured; None: none has."""
        known = [speed for shard in self._transport.shards if (speed := shard.read_bytes_per_s) is not None]
        return min(known, default=None)

    def fetch(self, sinks: Sequence[BlockSink], *, deadline: Deadline) -> None:
        """Fill the leading sinks; those past the first gap may be left out. Corrupt values leave the store."""
        if not sinks:
            return
        self._until_gap(
            [sink.block for sink in sinks], lambda wanted: self._fetch([sinks[i] for i in wanted], deadline)
        )
        for sink in sinks:
            if sink.rejected is not None:
                remove_if_corrupt(self._transport, sink.rejected, deadline=deadline)

    def put(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        """How many leading blocks the store, or this rank for others, holds. Raises ValueError on a payload of the
        wrong size."""
        payload_bytes = self._writer.layout.payload_bytes
        payloads = [flat_pieces(block.payload) for block in blocks]
        if any(sum(map(len, payload)) != payload_bytes for payload in payloads):
            raise ValueError(f"a block's payload has {payload_bytes} bytes")
        return self._until_gap(
            [block.key for block in blocks],
            lambda wanted: self._put([blocks[i] for i in wanted], [payloads[i] for i in wanted], deadline),
        )

    def _fetch(self, sinks: Sequence[BlockSink], deadline: Deadline) -> list[bool]:
        """Of one server, in one exchange. Which are in place now."""
        due = self._due([sink.block for sink in sinks])
        value_bytes = HEADER_BYTES + len(sinks[0].buffer)
        asked_at_s = self._missing.now_s()
        complete = self._transport.read(
            self._transport.shard_of(sinks[0].key),
            sinks,
            value_bytes=len(sinks) * value_bytes,
            renewals=self._lives(due),
            deadline=deadline,
        )
        if complete:
            self._note_renewed(due)
            for sink in sinks:
                if not sink.verified and sink.rejected is None:
                    self._missing.note(sink.key, asked_at_s=asked_at_s)
        verified = [sink.verified for sink in sinks]
        metrics.BYTES.labels("read").inc(sum(verified) * value_bytes)
        return verified

    def _put(
        self, blocks: Sequence[BlockToPut], payloads: Sequence[tuple[memoryview, ...]], deadline: Deadline
    ) -> list[bool]:
        """Of one server, in one exchange. Which are held now."""
        values = [
            self._writer.block(block.key, payload, exact=block.exact, owner=block.owner)
            for block, payload in zip(blocks, payloads, strict=True)
        ]
        if self._held is not None:
            self._held.keep(values)
            if not self._transport.shards:
                return [True] * len(values)
        shard = self._transport.shard_of(values[0].key)
        outcomes = self._transport.write(shard, values, only_if_absent=True, deadline=deadline)
        count_written(values, outcomes)
        self._note_renewed(
            block.key for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Written.STORED
        )
        held = (Written.STORED, Written.PRESENT)
        self._missing.forget(value.key for value, outcome in zip(values, outcomes, strict=True) if outcome in held)
        present = [index for index, outcome in enumerate(outcomes) if outcome is Written.PRESENT]
        due = self._due([blocks[index].key for index in present])
        if due and self._transport.renew(shard, self._lives(due), deadline=deadline):
            self._note_renewed(due)
        self._upgrade(shard, [(blocks[index], values[index]) for index in present if blocks[index].exact], deadline)
        return [self._held is not None or outcome in held for outcome in outcomes]

    def _upgrade(self, shard: Place, exact: Sequence[tuple[BlockToPut, ValueToWrite]], deadline: Deadline) -> None:
        """Replace those of the stored blocks that are approximate. Losing a race leaves a valid block."""
        heads = self._transport.heads(shard, [value.key for _, value in exact], deadline=deadline) if exact else None
        for (block, value), head in zip(exact, heads or (), strict=False):
            header = parse_header(head)
            if isinstance(header, Header) and header.identity == block.key.hash and not header.exact:
                self._transport.replace_if(shard, value, head=head, deadline=deadline)

    def _due(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return self._renewals.due(keys) if self._renewals is not None else []

    def _note_renewed(self, keys: Iterable[BlockKey]) -> None:
        if self._renewals is not None:
            self._renewals.note(keys)

    def _lives(self, keys: Sequence[BlockKey]) -> list[Renewal]:
        settings = self._writer.settings
        return [Renewal(block_store_key(key), settings.block_life_ms(key.depth)) for key in keys]

    def _batches(self, keys: Sequence[BlockKey]) -> list[slice]:
        """Consecutive keys of one run, within the limit of bytes."""
        writer = self._writer
        blocks_max = max(1, writer.settings.batch_bytes_max // (HEADER_BYTES + writer.layout.payload_bytes))
        batches: list[slice] = []
        start = 0
        for index in range(1, len(keys) + 1):
            if index == len(keys) or keys[index].run != keys[start].run or index - start == blocks_max:
                batches.append(slice(start, index))
                start = index
        return batches

    def _exchanges(self, keys: Sequence[BlockKey], batches: Sequence[slice]) -> list[list[int]]:
        """Numbers of batches by the exchange that moves them. A server's are dealt to its connections, so that all of
        them work from the front."""
        by_shard: dict[Place, list[int]] = defaultdict(list)
        for number, batch in enumerate(batches):
            by_shard[self._transport.shard_of(block_store_key(keys[batch.start]))].append(number)
        lanes, exchanges = self._writer.settings.data_connections, list[list[int]]()
        for numbers in by_shard.values():
            for lane in range(lanes):
                own = numbers[lane::lanes]
                exchanges += [own[at : at + BATCHES_AT_ONCE] for at in range(0, len(own), BATCHES_AT_ONCE)]
        return sorted(exchanges)

    def _until_gap(self, keys: Sequence[BlockKey], work: Callable[[Sequence[int]], Sequence[bool]]) -> int:
        """Work through all keys, count the leading ones done. What lies past a gap already seen is left out.
        `work`: does what belongs to some keys of one server, and tells which of them it has done."""
        batches = self._batches(keys)
        done = [0] * len(batches)
        gaps: list[int] = []

        def attempt(numbers: Sequence[int]) -> None:
            wanted = [number for number in numbers if not any(gap < number for gap in gaps)]
            if not wanted:
                return
            did = work([index for number in wanted for index in range(len(keys))[batches[number]]])
            at = 0
            for number in wanted:
                size = batches[number].stop - batches[number].start
                done[number] = leading(did[at : at + size])
                at += size
                if done[number] < size:
                    gaps.append(number)

        exchanges = self._exchanges(keys, batches) if self._transport.shards else [[n] for n in range(len(batches))]
        self._threads.run([lambda numbers=numbers: attempt(numbers) for numbers in exchanges])
        first_gap = min(gaps, default=len(batches) - 1)
        return sum(done[: first_gap + 1])


def remove_if_corrupt(transport: ValueTransport, value: Rejected, *, deadline: Deadline) -> None:
    """Count a value that was not used; remove it if it is wrong for everyone and still the one that was read."""
    shard = transport.shard_of(value.key)
    metrics.VALUES_REFUSED.labels(value.refusal.value).inc()
    if value.refusal in (Refusal.CHECKSUM, Refusal.HEADER_CHECKSUM):
        metrics.CHECKSUM_ERRORS.labels(shard.name).inc()
    if value.refusal in (Refusal.IDENTITY, Refusal.NAMESPACE, Refusal.CLASS, Refusal.MAC):
        metrics.IDENTITY_MISMATCHES.inc()
    if value.refusal.is_corrupt:
        header = parse_header(value.head)
        writer = f"{header.writer:016x}" if isinstance(header, Header) else "unknown"
        logger.error(
            "store %s: a value of writer %s is wrong (%s) and is removed", shard.name, writer, value.refusal.value
        )
        shard.note_corrupt()
        transport.delete_if(shard, value.key, head=value.head, value_bytes=value.value_bytes, deadline=deadline)


def leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def count_written(values: Sequence[ValueToWrite], outcomes: Sequence[Written]) -> None:
    stored = 0
    for value, outcome in zip(values, outcomes, strict=True):
        if outcome is Written.STORED:
            stored += value.value_bytes
        elif outcome is not Written.PRESENT:
            metrics.WRITES_DROPPED.labels(outcome.value).inc()
    metrics.BYTES.labels("written").inc(stored)
