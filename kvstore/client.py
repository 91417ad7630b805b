"""The store as engines and routers see it: lookups, blocks and snapshots. Synchronous and thread-safe.

Nothing here raises for a fault of the store. Absent, slow, full, wrong or away: each is a miss or a write that was not
taken, counted in `metrics.py`, and the caller computes. Every call ends by its deadline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from whalepod.core.block_keys import RUN_BLOCKS, BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import Incarnation

from . import metrics
from .block_batches import BatchThreads, BlockBatches, count_written, leading, remove_if_corrupt
from .block_reader import BlockReader
from .direct_peers import DirectPeers, Peer
from .held_values import HeldValues
from .missing_keys import MissingKeys
from .native_reads import Verdict
from .node_cache import NodeCache
from .plain_block_headers import PlainBlockHeaders
from .purge_watch import PurgeWatch
from .redis_transport import RedisTransport
from .renewals import Renewals
from .settings import StoreSettings
from .store_keys import block_store_key
from .transport import MadeValues, Place, ValueTransport, Written
from .value_format import HEADER_BYTES, BlockLayout, SnapshotValue
from .value_mac import ValueMac
from .value_sinks import SnapshotSink, WantedBlocks
from .value_writer import BlockToPut, ValueWriter, check_payloads, flat_pieces

__all__ = ["BlockToPut", "Fetched", "KvClient", "ShardHealth"]

PROBE_ALL_BLOCKS_MAX = 4 * RUN_BLOCKS
"""A chain up to this long is probed whole, in one round trip."""
SNAPSHOT_BYTES_GUESS = 8 << 20
"""How much the reader of a snapshot gives the network time for; the release's are about 3 MB."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The leading blocks that arrived and were verified. `exact[i]`: block i never passed an approximate replay."""

    count: int
    exact: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """One server as this process sees it."""

    address: str
    available: bool
    disabled_by: str | None
    """The server's refusal, if it will not have us at all (wrong password, missing permission)."""


class KvClient:
    """Finds, reads and writes values of one namespace.

    `layout` is what a block of this model looks like; a process that only looks up (the router) may leave it out.
    After `close` every answer is a miss.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        namespace: bytes,
        layout: BlockLayout | None = None,
        incarnation: Incarnation,
        clock: Clock = SYSTEM_CLOCK,
        transport: ValueTransport | None = None,
        cache: NodeCache | None = None,
        held: HeldValues | None = None,
        direct_key: bytes | None = None,
    ) -> None:
        """`transport` None: Redis, as the settings say. `cache` is shared with the node's other ranks, and closed here.
        `held` keeps what is put, uncopied, for ranks that read it from this one. `direct_key`: how this process and the
        ranks it reads from know each other; None: it reads from none.
        """
        threads = max(1, len(settings.addresses) * settings.data_connections)
        self._settings = settings
        self._transport = transport or RedisTransport(settings, jitter=Random(incarnation), clock=clock)
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="kv-batch")
        self._threads = BatchThreads(self._executor, threads)
        self._missing = MissingKeys(life_s=settings.missing_life_s, clock=clock)
        self._cache = cache
        self._held = held
        self._peers: DirectPeers | None = None
        self._watch: PurgeWatch | None = None
        self._writer: ValueWriter | None = None
        if layout is not None:
            self._mac = ValueMac(settings.mac_key) if settings.mac_key is not None else None
            self._writer = ValueWriter(namespace, layout, incarnation, settings, clock, self._mac)
            self._headers = PlainBlockHeaders(namespace, layout, signed=self._mac is not None)
            self._batches = BlockBatches(
                self._transport,
                self._writer,
                renewals=Renewals(interval_s=settings.touch_interval_s, clock=clock),
                missing=self._missing,
                threads=self._threads,
                held=held,
            )
            self._watch = self._watching(clock)
            store = self._batches if self._transport.shards else None
            self._reader = BlockReader(store, missing=self._missing, cache=cache)
            if direct_key is not None:
                jitter = Random(incarnation + 1)
                self._peers = DirectPeers(
                    settings, self._writer, key=direct_key, threads=self._threads, jitter=jitter, clock=clock
                )

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> int:
        """How many leading blocks of the chain `keys` (depth 0 first) are stored. A guess: only a fetch confirms it.

        Two round trips at most: one probes the first block of every run, one the blocks of the last run found.
        """
        if not keys or not self._transport.shards:
            metrics.LOOKUPS.labels("skipped").inc()
            return 0
        with metrics.LOOKUP_SECONDS.time():
            found, answered = self._lookup(keys, deadline)
        result = "hit" if found == len(keys) else "partial" if found else "miss" if answered else "error"
        metrics.LOOKUPS.labels(result).inc()
        return found

    def fetch_blocks(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        *,
        deadline: Deadline,
        exact_only: bool = False,
        handed_off_by: str | None = None,
        block_worth_s: float | None = None,
    ) -> Fetched:
        """Read the leading blocks of `keys` into `buffers`, one writable buffer of `layout.payload_bytes` a key.

        The result counts the blocks before the first that is missing, late or wrong (or, with `exact_only`,
        approximate): at the deadline it is what has arrived without a gap. Buffers past that hold anything. Nothing
        writes to a buffer after this has returned. A hit renews the block's life. `handed_off_by`: `host:port` of the
        rank that has just published them and can be asked too; empty: it serves nobody directly. A source
        known to take longer than `block_worth_s` for a block is not asked. Raises ValueError on a buffer of another
        size, or one that is not writable or not one run of bytes.
        """
        assert self._required_writer
        peer = self._peer(handed_off_by)
        with metrics.FETCH_SECONDS.labels("block").time():
            asked = None
            if not deadline.expired:
                block_bytes = self._headers.layout.payload_bytes
                asked = self._reader.ask(
                    keys, peer=peer is not None, block_worth_s=block_worth_s, block_bytes=block_bytes
                )
            try:
                blocks = WantedBlocks(keys, buffers, self._headers, exact_only=exact_only, mac=self._mac, asked=asked)
                self._reader.read(
                    blocks,
                    deadline=deadline,
                    peer=peer.batches if peer else None,
                    told=handed_off_by is not None,
                    block_worth_s=block_worth_s,
                )
            finally:
                if asked is not None:
                    asked.drop(deadline=deadline)
        count, exact = leading(blocks.verdicts), Verdict.EXACT
        return Fetched(count=count, exact=tuple([verdict == exact for verdict in blocks.verdicts[:count]]))

    def touch(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> bool:
        """Renew the lives of blocks that were used, wherever they came from: what devices and node caches serve is then
        not the first to leave the store. Each at most once in `touch_interval_s`. False: a server did not do it."""
        assert self._required_writer
        return not self._transport.shards or self._batches.renew(keys, deadline=deadline)

    def put_blocks(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        """Store blocks; returns how many *leading* ones the store is known to hold, or this rank for others.

        Past the first that was not taken some may be missing, and none is tried any more. A block that somebody stored
        before counts as held and its life is renewed. An exact block replaces an approximate one, never the reverse;
        nothing else is ever overwritten. Raises ValueError on a payload of the wrong size.
        """
        check_payloads(blocks, payload_bytes=self._required_writer.layout.payload_bytes)
        if self._cache is not None:
            self._cache.put(
                [(block.key.hash, block.key.parent, block.exact, flat_pieces(block.payload)) for block in blocks]
            )
        if not self._transport.shards and self._held is None:
            return 0
        with metrics.STORE_SECONDS.labels("block").time():
            return self._batches.put(blocks, deadline=deadline)

    def put_snapshot(self, key: bytes, value: SnapshotValue, *, ttl_s: float, deadline: Deadline) -> bool:
        """Store a snapshot under a key of `store_keys.py`, over any earlier one. True: the store has acknowledged it,
        or this rank holds it for others.

        Raises ValueError if it is above `value_bytes_max`.
        """
        to_write = self._required_writer.snapshot(key, value, life_ms=max(1, round(ttl_s * 1000)))
        bytes_max = self._settings.value_bytes_max
        if to_write.value_bytes > bytes_max:
            raise ValueError(f"a snapshot of {to_write.value_bytes} bytes is above value_bytes_max ({bytes_max})")
        if self._held is not None:
            self._held.keep([to_write])
        if not self._transport.shards:
            return self._held is not None
        with metrics.STORE_SECONDS.labels("snapshot").time():
            shard = self._transport.shard_of(key)
            outcomes = self._transport.write(shard, MadeValues([to_write]), only_if_absent=False, deadline=deadline)
        count_written(outcomes, value_bytes=to_write.value_bytes)
        return outcomes == [Written.STORED] or self._held is not None

    def get_snapshot(
        self, key: bytes, *, deadline: Deadline, unlink: bool = False, handed_off_by: str | None = None
    ) -> SnapshotValue | None:
        """The snapshot under `key`, verified, or None. `unlink` removes it after it has been read (hand-offs).
        `handed_off_by`: as for blocks."""
        with metrics.FETCH_SECONDS.labels("snapshot").time():
            value = self._snapshot_from(self._transport, key, deadline) if self._transport.shards else None
            peer = self._peer(handed_off_by) if value is None else None
            if peer is not None:
                value = self._snapshot_from(peer.transport, key, deadline)
        if value is not None:
            metrics.BYTES.labels("read").inc(HEADER_BYTES + sum(map(len, value.parts.values())))
            if unlink and self._transport.shards:
                self._transport.unlink(self._transport.shard_of(key), [key], deadline=deadline)
        return value

    def unlink(self, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        """Remove values by their Redis keys; returns how many were there, as far as the store has answered."""
        return sum(
            self._transport.unlink(shard, [keys[index] for index in indices], deadline=deadline)
            for shard, indices in self._by_shard(keys).items()
        )

    def health(self) -> tuple[ShardHealth, ...]:
        """One entry a shard, without asking the store."""
        return tuple(
            ShardHealth(address=shard.name, available=shard.available, disabled_by=shard.disabled_by)
            for shard in self._transport.shards
        )

    @property
    def healthy(self) -> bool:
        """Every shard is available, as far as this process knows. True if there is no store."""
        return all(shard.available for shard in self._transport.shards)

    @property
    def node_cache_blocks(self) -> tuple[int, int] | None:
        """Used and in all, of the cache that the ranks of this machine share; None: there is none."""
        return None if self._cache is None else (self._cache.slots_used, self._cache.slots_total)

    def close(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.close()
        self._executor.shutdown()
        if self._peers is not None:
            self._peers.close()
        self._transport.close()
        if self._cache is not None:
            self._cache.close()

    @property
    def _required_writer(self) -> ValueWriter:
        assert self._writer is not None, "a client without a layout only looks up"
        return self._writer

    def _watching(self, clock: Clock) -> PurgeWatch | None:
        """None: this process keeps no copies."""
        if not self._transport.shards or (self._cache is None and self._held is None):
            return None
        return PurgeWatch(self._transport, self._forget_copies, clock=clock)

    def _forget_copies(self, epoch: int) -> None:
        if self._cache is not None:
            self._cache.purge(epoch)
        if self._held is not None:
            self._held.clear()

    def _peer(self, address: str | None) -> Peer | None:
        return self._peers.find(address) if address and self._peers is not None else None

    def _snapshot_from(self, transport: ValueTransport, key: bytes, deadline: Deadline) -> SnapshotValue | None:
        writer, bytes_max = self._required_writer, self._settings.value_bytes_max
        sink = SnapshotSink(key, writer.namespace, writer.layout.format_id, bytes_max, self._mac)
        transport.read(transport.shard_of(key), sink, value_bytes=SNAPSHOT_BYTES_GUESS, deadline=deadline)
        if sink.rejected is not None:
            remove_if_corrupt(transport, sink.rejected, deadline=deadline)
        return sink.value

    def _lookup(self, keys: Sequence[BlockKey], deadline: Deadline) -> tuple[int, bool]:
        """Leading blocks found, and whether every server asked has answered."""
        if len(keys) <= PROBE_ALL_BLOCKS_MAX:
            present, answered = self._exist(keys, deadline)
            return leading(present), answered
        heads, heads_answered = self._exist(keys[::RUN_BLOCKS], deadline)
        runs = leading(heads)
        if not runs:
            return 0, heads_answered
        last = (runs - 1) * RUN_BLOCKS
        present, answered = self._exist(keys[last : last + RUN_BLOCKS], deadline)
        return last + leading(present), heads_answered and answered

    def _exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> tuple[bytearray, bool]:
        names = [block_store_key(key) for key in keys]
        present = bytearray(len(keys))
        silent: list[str] = []

        def probe(shard: Place, indices: Sequence[int]) -> None:
            answers = self._transport.exists(shard, [names[index] for index in indices], deadline=deadline)
            if answers is None:
                silent.append(shard.name)
                return
            for index, answer in zip(indices, answers, strict=True):
                present[index] = answer

        by_shard = self._by_shard(names)
        self._threads.run([lambda item=item: probe(*item) for item in by_shard.items()])
        return present, not silent

    def _by_shard(self, keys: Sequence[bytes]) -> dict[Place, list[int]]:
        """Indices into `keys` by the server that has them; empty if there is no store."""
        by_shard: dict[Place, list[int]] = defaultdict(list)
        if self._transport.shards:
            for index, key in enumerate(keys):
                by_shard[self._transport.shard_of(key)].append(index)
        return by_shard
