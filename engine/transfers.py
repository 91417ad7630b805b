"""Moves stored state between a rank and the store, off the loop's thread.

    loop ──load, prefetch────▶ [loads]  ──▶ worker ──▶ store ──▶ Loaded ───────────▶ deliver
    loop ──blocks, snapshots─▶ [writes] ──▶ worker ──▶ store ──▶ HandoffWritten ───▶ deliver

Nothing here knows what the bytes mean. Queues are bounded: loads by the slots of a rank (each has at most one),
writes by their bytes. Hand-offs are written first, then blocks that were met before, then the rest; what is full drops
the last class first. Whatever the store does, a load is answered once and so is a hand-off. The head of a
context-parallel group waits for what became of blocks that the others write as for its own.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from whalepod.core.block_keys import RUN_BLOCKS, BlockHash, BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import RequestId
from whalepod.core.tracing import span
from whalepod.kvstore.client import BlockToPut
from whalepod.kvstore.metrics import WRITES_DROPPED
from whalepod.kvstore.value_format import SnapshotValue

from .host_copies import Copied
from .left_snapshots import LeftSnapshots
from .options import RankOptions
from .state_image import StateImage
from .state_store import (
    Answer,
    HandoffWritten,
    Loaded,
    LoadJob,
    NewBuffer,
    Owner,
    Prefetched,
    PrefetchJob,
    RoomFreed,
    StateStore,
    run_load,
    run_prefetch,
)
from .touches import TOUCH_TIMEOUT_S, Touches

log = logging.getLogger(__name__)

SEEN_BLOCKS_MAX = 1 << 16
"""Blocks offered to the store that are remembered, to know one that comes back."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    block: Copied[BlockToPut]
    bytes: int
    owner: Owner | None
    """The hand-off it belongs to. None: it may be dropped, nobody waits for it."""
    deadline: Deadline
    tell: Callable[[bool], None] | None = None
    """Of a block that another rank has entrusted to this one: called once, with whether the store has it."""


@dataclass(frozen=True, slots=True)
class EntrustedWrite:
    """A block of a hand-off that another rank writes."""

    owner: Owner
    stored: Future[bool]
    deadline: Deadline
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotWrite:
    """With an owner: the last write of a hand-off."""

    key: bytes
    value: Copied[SnapshotValue]
    life_s: float
    bytes: int
    owner: Owner | None
    deadline: Deadline
    traceparent: str = ""


Write = BlockWrite | EntrustedWrite | SnapshotWrite


@dataclass(slots=True)
class _Queue:
    """Writes of one class, and their bytes."""

    writes: deque[Write]
    bytes: int = 0

    def put(self, write: Write) -> None:
        self.writes.append(write)
        self.bytes += write.bytes

    def take_batch(self) -> list[Write]:
        """Blocks of one owner and kind, a run at most, or one snapshot; empty if there is nothing."""
        batch: list[Write] = []
        while self.writes and len(batch) < RUN_BLOCKS:
            write = self.writes[0]
            if batch and (type(write) is not type(batch[0]) or write.owner != batch[0].owner):
                break
            batch.append(self.writes.popleft())
            self.bytes -= write.bytes
            if isinstance(write, SnapshotWrite):
                break
        return batch

    def drop_last(self, bytes_max: int) -> None:
        """Drop the newest until no more than so many bytes are left."""
        while self.writes and self.bytes > bytes_max:
            self.bytes -= self.writes.pop().bytes
            WRITES_DROPPED.labels("queue_full").inc()

    def remove(self, doomed: Callable[[Write], bool]) -> None:
        if any(map(doomed, self.writes)):
            kept = [write for write in self.writes if not doomed(write)]
            self.writes, self.bytes = deque(kept), sum(write.bytes for write in kept)


@dataclass(slots=True)
class _HandoffProgress:
    blocks_stored: int = 0
    failed: bool = False


class Transfers:
    """Thread-safe. `deliver` is called by workers with every answer; it must not block."""

    def __init__(
        self,
        store: StateStore,
        *,
        block_bytes: int,
        new_buffer: NewBuffer,
        queue_bytes_max: int,
        write_timeout_s: float,
        deliver: Callable[[Answer], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._block_bytes = block_bytes
        self._new_buffer = new_buffer
        self._queue_bytes_max = queue_bytes_max
        self._write_timeout_s = write_timeout_s
        self._deliver = deliver
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._loads: deque[LoadJob] = deque()
        self._prefetches: deque[PrefetchJob] = deque()
        self._prefetching = False
        self._unlinks: deque[bytes] = deque()
        self._touches = Touches()
        self._handoff_writes = _Queue(deque())
        self._shared_writes = _Queue(deque())
        self._other_writes = _Queue(deque())
        self._seen_blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self._handoffs: dict[Owner, _HandoffProgress] = {}
        self._left = LeftSnapshots(clock)
        self._was_full = False

    # The loop's side.

    def load(self, job: LoadJob) -> None:
        """Answered by one `Loaded`, unless its owner is dropped first."""
        with self._changed:
            self._loads.append(job)
            self._changed.notify_all()

    def prefetch(self, job: PrefetchJob) -> None:
        """Answered by one `Prefetched`, unless it is dropped first. Loads come before it, and one runs at a time."""
        with self._changed:
            self._prefetches.append(job)
            self._changed.notify_all()

    def drop_prefetch(self, request_id: RequestId, attempt: int) -> None:
        """Nobody needs it any more. One that runs is still answered."""
        with self._changed:
            kept = (job for job in self._prefetches if (job.request_id, job.attempt) != (request_id, attempt))
            self._prefetches = deque(kept)

    def has_room(self, size_bytes: int, *, owner: Owner | None, block: BlockHash | None = None) -> bool:
        """Whether a write of that size may be queued now. After a no to an owner, `RoomFreed` tells when to ask
        again. A `block` that was offered before pushes out those that were not."""
        with self._changed:
            if owner is None:
                # First-time blocks make room for any other.
                queued = self._handoff_writes.bytes + self._shared_writes.bytes
                if queued + self._other_writes.bytes + size_bytes <= self._queue_bytes_max:
                    return True
                if block not in self._seen_blocks or queued + size_bytes > self._queue_bytes_max:
                    self._note_seen(block)
                    WRITES_DROPPED.labels("queue_full").inc()
                    return False
                self._other_writes.drop_last(self._queue_bytes_max - queued - size_bytes)
                return True
            room = not self._handoff_writes.writes or self._handoff_writes.bytes + size_bytes <= self._queue_bytes_max
            self._was_full |= not room
            return room

    def has_room_for_entrusted(self, size_bytes: int) -> bool:
        """Whether a block of that size may be written for another rank."""
        with self._changed:
            return self._handoff_writes.bytes + size_bytes <= self._queue_bytes_max

    def write(self, write: Write) -> None:
        """Store something some time. Blocks of an owner come before everything that has none; its snapshot comes
        after all its blocks, is only written if the store took them, and is answered by one `HandoffWritten`."""
        with self._changed:
            if isinstance(write, BlockWrite) and write.tell is not None:
                self._handoff_writes.put(write)  # it is one of somebody else's
            elif write.owner is None:
                self._queue_of(write).put(write)
            else:
                self._handoffs.setdefault(write.owner, _HandoffProgress())
                self._handoff_writes.put(write)
            self._changed.notify_all()

    def let_go(self, owner: Owner) -> None:
        """Nobody waits for this owner any more: its queued blocks are still written, its load is not made."""
        with self._changed:
            self._loads = deque(job for job in self._loads if job.owner != owner)
            self._handoffs.pop(owner, None)

    def drop(self, owner: Owner) -> None:
        """As `let_go`, and what it has queued is not written."""
        self.let_go(owner)
        with self._changed:
            self._handoff_writes.remove(lambda write: write.owner == owner)

    def touch(self, hashes: Sequence[BlockHash], *, root: BlockHash) -> None:
        """The leading blocks of a chain are being used: the store is told when there is nothing else to do, run by run.
        One that does not answer is told of nothing more that is queued."""
        with self._changed:
            self._touches.add(hashes, root=root)
            self._changed.notify_all()

    def unlink(self, key: bytes) -> None:
        """Remove a snapshot that nobody waits for, or that was answered for, some time after what is being written now.
        If it is still queued, it is not written."""
        with self._changed:
            self._other_writes.remove(lambda write: isinstance(write, SnapshotWrite) and write.key == key)
            self._unlinks.append(key)
            self._changed.notify_all()

    def unlink_later(self, key: bytes, when: Deadline) -> None:
        """Remove a snapshot that somebody may still want until then."""
        with self._changed:
            self._left.note(key, when)
            self._changed.notify_all()

    @property
    def queued_bytes(self) -> int:
        """Of writes that wait for the store."""
        with self._changed:
            return sum(queue.bytes for queue in (self._handoff_writes, self._shared_writes, self._other_writes))

    def close(self) -> None:
        """Wake the workers up for good. What is queued is forgotten."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The workers' side. Each call does one piece of work; False: there is none, or, when waiting, there will be none.

    def work_on_load(self, *, wait: bool) -> bool:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.has_loads or self._closed)
            if self._closed or not self.has_loads:
                return False
            job = self._loads.popleft() if self._loads else None
            prefetch = self._prefetches.popleft() if job is None else None
            self._prefetching |= prefetch is not None
        if prefetch is not None:
            self._run_prefetch(prefetch)
        elif job is not None:
            self._run_load(job)
        return True

    @property
    def has_loads(self) -> bool:
        """`work_on_load` would find something to do."""
        return bool(self._loads) or (bool(self._prefetches) and not self._prefetching)

    def _run_prefetch(self, job: PrefetchJob) -> None:
        try:
            fetched = run_prefetch(self._store, job, block_bytes=self._block_bytes, new_buffer=self._new_buffer)
        except Exception:
            log.exception("a prefetch failed: it is fetched later")
            fetched = Prefetched(job)
        with self._changed:
            self._prefetching = False
            self._changed.notify_all()
        self._deliver(fetched)

    def _run_load(self, job: LoadJob) -> None:
        try:
            with span("kv restore", job.traceparent, blocks_wanted=len(job.keys)) as restored:
                loaded = run_load(self._store, job, block_bytes=self._block_bytes, new_buffer=self._new_buffer)
                restored.set(
                    blocks_on_device=job.blocks_present,
                    blocks_fetched=len(loaded.payloads),
                    snapshot=loaded.own_snapshot is not None or loaded.turn_snapshot is not None,
                )
        except Exception:
            log.exception("a load failed: a miss")
            loaded = Loaded(job)
        self._deliver(loaded)

    def work_on_write(self, *, wait: bool) -> bool:
        with self._changed:
            while wait and not (self.has_writes or self._closed):
                self._changed.wait(self._left.remaining_s())
            if not self.has_writes or self._closed:
                return False
            unlinks, self._unlinks = [*self._unlinks, *self._left.take_due()], deque()
            queues = (self._handoff_writes, self._shared_writes, self._other_writes)
            batch = next((batch for queue in queues if (batch := queue.take_batch())), [])
            touched = self._touches.take_run() if not batch else []
            room_freed, self._was_full = self._was_full, False
        if room_freed:
            self._deliver(RoomFreed())
        try:
            if unlinks:
                self._store.unlink(unlinks, deadline=Deadline.after(self._write_timeout_s, self._clock))
            if touched:
                self._tell_touched(touched)
            stored = self._store_batch(batch) if batch else 0
        except Exception:
            log.exception("a write failed: not stored")
            stored = 0
        for index, write in enumerate(batch):
            if isinstance(write, BlockWrite) and write.tell is not None:
                write.tell(index < stored)
        if batch and batch[0].owner is not None:
            self._account(batch[0].owner, batch, stored)
        return True

    def _tell_touched(self, keys: Sequence[BlockKey]) -> None:
        if not self._store.touch(keys, deadline=Deadline.after(TOUCH_TIMEOUT_S, self._clock)):
            with self._changed:
                self._touches.forget()

    @property
    def has_writes(self) -> bool:
        """`work_on_write` would find something to do."""
        queues = (self._handoff_writes, self._shared_writes, self._other_writes)
        return bool(self._unlinks or self._touches) or self._left.due or any(queue.writes for queue in queues)

    def _queue_of(self, write: Write) -> _Queue:
        """Of a write that nobody waits for: by whether its block was offered before."""
        if not isinstance(write, BlockWrite):
            return self._other_writes
        block = write.block.value.key.hash
        queue = self._shared_writes if block in self._seen_blocks else self._other_writes
        self._note_seen(block)
        return queue

    def _note_seen(self, block: BlockHash | None) -> None:
        if block is not None:
            self._seen_blocks[block] = None
            self._seen_blocks.move_to_end(block)
            if len(self._seen_blocks) > SEEN_BLOCKS_MAX:
                self._seen_blocks.popitem(last=False)

    def _store_batch(self, batch: Sequence[Write]) -> int:
        """How many leading writes of the batch the store has acknowledged."""
        head = batch[0]
        deadline = head.deadline.earlier(self._write_timeout_s)
        if head.owner is not None and self._has_failed(head.owner):
            return 0
        if isinstance(head, SnapshotWrite):
            if head.owner is not None:
                with self._changed:
                    self._left.note(head.key, head.deadline)
            value = head.value.wait()
            with span("kv store", head.traceparent, bytes=head.bytes) as storing:
                stored = self._store.put_snapshot(head.key, value, ttl_s=head.life_s, deadline=deadline)
                storing.set(stored=stored)
            return int(stored)
        if isinstance(head, EntrustedWrite):
            return _leading_stored([write.stored for write in batch if isinstance(write, EntrustedWrite)], deadline)
        blocks = [write.block.wait() for write in batch if isinstance(write, BlockWrite)]
        return self._store.put_blocks(blocks, deadline=deadline)

    def _has_failed(self, owner: Owner) -> bool:
        with self._changed:
            progress = self._handoffs.get(owner)
            return progress is not None and progress.failed

    def _account(self, owner: Owner, batch: Sequence[Write], stored: int) -> None:
        with self._changed:
            progress = self._handoffs.get(owner)
            if progress is None:
                return
            progress.failed |= stored < len(batch)
            if not isinstance(batch[0], SnapshotWrite):
                progress.blocks_stored += stored
                return
            del self._handoffs[owner]
        self._deliver(HandoffWritten(owner, stored=not progress.failed, blocks_stored=progress.blocks_stored))


def _leading_stored(answers: Sequence[Future[bool]], deadline: Deadline) -> int:
    """Waits for them."""
    for count, answer in enumerate(answers):
        try:
            if not answer.result(deadline.remaining_s()):
                return count
        except TimeoutError:
            return count
    return len(answers)


def new_transfers(
    store: StateStore, image: StateImage, options: RankOptions, *, deliver: Callable[[Answer], None], clock: Clock
) -> Transfers:
    """Of a rank with these options, for blocks of `image`."""
    return Transfers(
        store,
        block_bytes=image.block_layout.payload_bytes,
        new_buffer=image.copies.new_buffer,
        queue_bytes_max=options.publish_queue_bytes,
        write_timeout_s=options.publish_timeout_s,
        deliver=deliver,
        clock=clock,
    )
