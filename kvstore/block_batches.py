"""Blocks in and out of the store, in batches of one run: at most 16 blocks of one server. A few batches of a server are
moved in one exchange, so that it is not idle between them.

    fetch ──▶ header judged, payload in place, checksum ──▶ leading verified blocks; corrupt values removed
    put   ──▶ SET NX ──▶ renew the life of what was there, replace approximate by exact ──▶ leading blocks held

Exchanges of one call run side by side, as many as there are connections. A call returns when every one has ended.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Deadline

from . import metrics
from .columns import joined, put_rows, rows
from .held_values import HeldValues
from .missing_keys import MissingKeys
from .native_reads import Verdict
from .renewals import Renewals
from .store_keys import block_store_key, block_store_keys
from .transport import Asked, Place, Renewal, ValueToWrite, ValueTransport, Written
from .value_format import HEADER_BYTES, Header, Refusal, parse_header
from .value_sinks import Rejected, WantedBlocks
from .value_writer import BlocksToWrite, BlockToPut, ValueWriter

logger = logging.getLogger(__name__)

ASKED_BLOCKS = 3
"""Asked for before a fetch is prepared: about as much as keeps a server busy so long."""
BATCHES_AT_ONCE = 4
"""Of one exchange. With more the server is idle less often, and another caller waits longer for a connection."""


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
            if helpers:
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
        self._blocks_max = max(1, writer.settings.batch_bytes_max // writer.block_bytes)

    @property
    def available(self) -> bool:
        """Some server is, as far as is known."""
        return any(shard.available for shard in self._transport.shards)

    @property
    def read_bytes_per_s(self) -> float | None:
        """Of the slowest server that has been measured; None: none has."""
        known = [speed for shard in self._transport.shards if (speed := shard.read_bytes_per_s) is not None]
        return min(known, default=None)

    def ask(self, keys: Sequence[BlockKey]) -> Asked | None:
        """Ask for the first few blocks of a chain that is about to be fetched. None: nothing was asked."""
        if len(keys) <= ASKED_BLOCKS or keys[0].run != keys[ASKED_BLOCKS].run or self._blocks_max <= ASKED_BLOCKS:
            return None
        names = block_store_keys(keys[:ASKED_BLOCKS])
        return None if self._missing.before_first(names) < ASKED_BLOCKS else self._transport.ask(names)

    def fetch(self, blocks: WantedBlocks, wanted: Sequence[int], *, deadline: Deadline) -> None:
        """Fill the buffers of the leading ones of `wanted` (numbers of `blocks`, ascending); those past the first gap
        may be left out. Corrupt values leave the store."""
        if not wanted:
            return
        self._until_gap(
            rows(blocks.keys, wanted),
            lambda chosen: self._fetch(blocks, rows(wanted, chosen), deadline),
            lanes=self._writer.settings.data_connections,
        )
        for number in wanted if blocks.rejected else ():
            rejected = blocks.rejected.pop(number, None)
            if rejected is not None:
                remove_if_corrupt(self._transport, rejected, deadline=deadline)

    def renew(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> bool:
        """Lengthen the lives of blocks that were used from elsewhere, unless this process has done it lately. False: a
        server did not do it; the next were not asked."""
        by_shard: dict[Place, list[BlockKey]] = defaultdict(list)
        for key in self._due(keys):
            by_shard[self._transport.shard_of(block_store_key(key))].append(key)
        for shard, due in by_shard.items():
            if not self._transport.renew(shard, self._lives(due), deadline=deadline):
                return False
            self._note_renewed(due)
        return True

    def put(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        """How many leading blocks the store, or this rank for others, holds. Payloads have been checked."""
        return self._until_gap(
            [block.key for block in blocks],
            lambda chosen: self._put(rows(blocks, chosen), deadline),
            lanes=self._writer.settings.data_connections if self._writer.mac is not None else 1,
        )

    def _fetch(self, blocks: WantedBlocks, numbers: Sequence[int], deadline: Deadline) -> bytes:
        """Of one server, in one exchange. Their verdicts."""
        due = self._due(rows(blocks.keys, numbers))
        value_bytes = HEADER_BYTES + self._writer.layout.payload_bytes
        asked_at_s = self._missing.now_s()
        complete = self._transport.read(
            self._transport.shard_of(blocks.names[numbers[0]]),
            blocks.batch(numbers),
            value_bytes=len(numbers) * value_bytes,
            renewals=self._lives(due),
            deadline=deadline,
        )
        verdicts = bytes(rows(blocks.verdicts, numbers))
        absent = verdicts.count(Verdict.NONE)
        if complete:
            self._note_renewed(due)
            for number, verdict in zip(numbers, verdicts, strict=True) if absent else ():
                if verdict == Verdict.NONE and number not in blocks.rejected:
                    self._missing.note(blocks.names[number], asked_at_s=asked_at_s)
        if arrived := len(numbers) - absent:
            metrics.BYTES.labels("read").inc(arrived * value_bytes)
            metrics.EXCHANGE_BYTES.labels("read").observe(arrived * value_bytes)
        return verdicts

    def _put(self, blocks: Sequence[BlockToPut], deadline: Deadline) -> bytes:
        """Of one server, in one exchange. Which are held now: not 0."""
        values = BlocksToWrite(self._writer, blocks)
        if self._held is not None:
            self._held.keep(values[number] for number in range(len(blocks)))
            if not self._transport.shards:
                return b"\1" * len(blocks)
        shard = self._transport.shard_of(values.keys[0])
        outcomes = self._transport.write(shard, values, only_if_absent=True, deadline=deadline)
        count_written(outcomes, value_bytes=values.value_bytes)
        metrics.EXCHANGE_BYTES.labels("written").observe(len(blocks) * values.value_bytes)
        stored, present = _numbers_of(Written.STORED, outcomes), _numbers_of(Written.PRESENT, outcomes)
        self._note_renewed([block.key for block in rows(blocks, stored)])
        self._missing.forget([*rows(values.keys, stored), *rows(values.keys, present)])
        if present:
            self._renew_and_upgrade(shard, blocks, values, present, deadline)
        if self._held is not None:
            return b"\1" * len(blocks)
        held = bytearray(len(blocks))
        for numbers in (stored, present):
            put_rows(held, numbers, b"\1" * len(numbers))
        return bytes(held)

    def _renew_and_upgrade(
        self,
        shard: Place,
        blocks: Sequence[BlockToPut],
        values: BlocksToWrite,
        present: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """What somebody stored before: its life is renewed, and an approximate block gives way to an exact one."""
        due = self._due([blocks[number].key for number in present])
        if due and self._transport.renew(shard, self._lives(due), deadline=deadline):
            self._note_renewed(due)
        self._upgrade(shard, [(blocks[number], values[number]) for number in present if blocks[number].exact], deadline)

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
        blocks_max = self._blocks_max
        batches: list[slice] = []
        start = 0
        for _, run in groupby([key.run for key in keys]):
            end = start + len(list(run))
            batches += [slice(at, min(end, at + blocks_max)) for at in range(start, end, blocks_max)]
            start = end
        return batches

    def _exchanges(self, keys: Sequence[BlockKey], batches: Sequence[slice], lanes: int) -> list[list[list[int]]]:
        """Numbers of batches by the exchange that moves them, by the thread that has it. A server's are dealt to
        `lanes` threads, so that all of them work from the front; one keeps a server on this machine busy."""
        by_shard: dict[Place, list[int]] = defaultdict(list)
        for number, batch in enumerate(batches):
            by_shard[self._transport.shard_of(block_store_key(keys[batch.start]))].append(number)
        jobs = list[list[list[int]]]()
        for shard, numbers in by_shard.items():
            step = 1 if shard.is_local else lanes
            for lane in range(min(step, len(numbers))):
                own = numbers[lane::step]
                jobs.append([own[at : at + BATCHES_AT_ONCE] for at in range(0, len(own), BATCHES_AT_ONCE)])
        return sorted(jobs)

    def _until_gap(self, keys: Sequence[BlockKey], work: Callable[[Sequence[int]], bytes], *, lanes: int) -> int:
        """Work through all keys, count the leading ones done. What lies past a gap already seen is left out.
        `work`: does what belongs to some keys of one server, and tells which of them it has done: not 0. `lanes`:
        threads a server."""
        batches = self._batches(keys)
        done = [0] * len(batches)
        gaps: list[int] = []

        def attempt(numbers: Sequence[int]) -> None:
            first_gap, at = min(gaps, default=len(batches)), 0
            wanted = [number for number in numbers if number <= first_gap]
            if not wanted:
                return
            did = work(joined(batches[number] for number in wanted))
            for number in wanted:
                size = batches[number].stop - batches[number].start
                done[number] = leading(did[at : at + size])
                at += size
                if done[number] < size:
                    gaps.append(number)

        def attempt_all(exchanges: Sequence[Sequence[int]]) -> None:
            for numbers in exchanges:
                attempt(numbers)

        here = [[[number] for number in range(len(batches))]]
        jobs = self._exchanges(keys, batches, lanes) if self._transport.shards else here
        self._threads.run([lambda exchanges=exchanges: attempt_all(exchanges) for exchanges in jobs])
        first_gap = min(gaps, default=len(batches) - 1)
        return sum(done[: first_gap + 1])


def _numbers_of(wanted: Written, outcomes: Sequence[Written]) -> Sequence[int]:
    count = outcomes.count(wanted)
    if count in (0, len(outcomes)):
        return range(count)
    return [number for number, outcome in enumerate(outcomes) if outcome is wanted]


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


def leading(flags: bytes | bytearray) -> int:
    """How many are not 0 before the first that is."""
    first = flags.find(0)
    return len(flags) if first < 0 else first


def count_written(outcomes: Sequence[Written], *, value_bytes: int) -> None:
    """Of values of so many bytes each."""
    metrics.BYTES.labels("written").inc(outcomes.count(Written.STORED) * value_bytes)
    for outcome in (Written.DROPPED, Written.UNKNOWN):
        if count := outcomes.count(outcome):
            metrics.WRITES_DROPPED.labels(outcome.value).inc(count)
