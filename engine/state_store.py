"""What a rank asks of the store, and how a prefix is fetched from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from whalepod.core.block_keys import RUN_BLOCKS, BlockKey
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.kvstore.client import BlockToPut, Fetched
from whalepod.kvstore.value_format import SnapshotValue

FETCH_RUNS_MAX = 16
"""Runs of blocks that one read asks for at most."""


NewBuffer = Callable[[int], memoryview]
"""Memory of so many bytes that a block is read into."""


class StateStore(Protocol):
    """What a rank asks of the store (`kvstore/client.py`). No call raises for a fault of the store."""

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> int: ...

    def fetch_blocks(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        *,
        deadline: Deadline,
        exact_only: bool = False,
        handed_off_by: str | None = None,
        block_worth_s: float | None = None,
    ) -> Fetched: ...

    def touch(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> bool: ...

    def put_blocks(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int: ...

    def put_snapshot(self, key: bytes, value: SnapshotValue, *, ttl_s: float, deadline: Deadline) -> bool: ...

    def get_snapshot(
        self, key: bytes, *, deadline: Deadline, unlink: bool = False, handed_off_by: str | None = None
    ) -> SnapshotValue | None: ...

    def unlink(self, keys: Sequence[bytes], *, deadline: Deadline) -> int: ...


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose transfer this is. An answer for an earlier holding of the same request carries an older generation."""

    request_id: RequestId
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class OwnSnapshot:
    """Where a snapshot of this very request may be."""

    key: bytes
    blocks: int
    """Full blocks below its boundary, which it needs."""
    handed_off_by: str | None = None
    """As of a LoadJob."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Find the blocks after those on the device, and windows to go with them."""

    owner: Owner
    keys: Sequence[BlockKey]
    """Of the blocks that may be wanted, depth 0 first."""
    blocks_present: int
    """Leading ones that are on the device."""
    blocks_wanted: int
    """Without a snapshot of its own."""
    confirm_present: bool
    """Also ask whether those are stored."""
    exact_only: bool
    deadline: Deadline
    payloads: Sequence[memoryview] = ()
    """Blocks behind those present that have been fetched before."""
    payloads_exact: Sequence[bool] = ()
    own_snapshots: Sequence[OwnSnapshot] = ()
    """The best first."""
    handed_off_by: str | None = None
    """Of a hand-off: `host:port` where the rank that made it serves its memory; empty: it does not."""
    block_worth_s: float | None = None
    """A source that takes longer for a block is not asked; None: any is."""
    traceparent: str = ""
    turn_snapshot: Callable[[int], bytes | None] | None = None
    """Given the leading blocks available: store key of the turn snapshot to look for."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found. `payloads[i]` is block `job.blocks_present + i`."""

    job: LoadJob
    payloads: Sequence[memoryview] = ()
    exact: Sequence[bool] = ()
    present_stored: int = 0
    """Leading blocks of those present that the store seems to hold, if that was asked."""
    own_snapshot: SnapshotValue | None = None
    turn_snapshot: SnapshotValue | None = None

    @property
    def owner(self) -> Owner:
        return self.job.owner


@dataclass(frozen=True, slots=True)
class PrefetchJob:
    """Find the blocks after those on the device, for a request that holds nothing yet."""

    request_id: RequestId
    attempt: int
    keys: Sequence[BlockKey]
    """Of the blocks wanted, depth 0 first."""
    blocks_present: int
    exact_only: bool
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What was found. `payloads[i]` is block `job.blocks_present + i`."""

    job: PrefetchJob
    payloads: Sequence[memoryview] = ()
    exact: Sequence[bool] = ()


@dataclass(frozen=True, slots=True)
class HandoffWritten:
    """All writes of a hand-off have been tried. `stored`: the store has acknowledged every one of them."""

    owner: Owner
    stored: bool
    blocks_stored: int


@dataclass(frozen=True, slots=True)
class RoomFreed:
    """Something of a hand-off that had no room may be offered again."""


Answer = Loaded | Prefetched | HandoffWritten | RoomFreed


def run_load(store: StateStore, job: LoadJob, *, block_bytes: int, new_buffer: NewBuffer) -> Loaded:
    """Own snapshot, then blocks run by run up to the first that is missing; if that is not all, a turn snapshot where
    they end."""
    own: SnapshotValue | None = None
    wanted = job.blocks_wanted
    for one in job.own_snapshots:
        own = store.get_snapshot(one.key, deadline=job.deadline, handed_off_by=one.handed_off_by)
        if own is not None:
            wanted = one.blocks
            break
    present_stored = 0
    if job.confirm_present and job.blocks_present:
        present_stored = store.lookup(job.keys[: job.blocks_present], deadline=job.deadline)
    payloads, exact = list(job.payloads), list(job.payloads_exact)
    giver, worth_s, keys = job.handed_off_by, job.block_worth_s, job.keys[:wanted]
    buffers = partial(new_buffer, block_bytes)
    _fetch_on(store, job, keys, payloads, exact, new_buffer=buffers, giver=giver, worth_s=worth_s)
    blocks, turn = job.blocks_present + len(payloads), None
    if job.turn_snapshot is not None and (own is None or blocks < wanted):
        key = job.turn_snapshot(blocks)
        turn = store.get_snapshot(key, deadline=job.deadline) if key else None
    return Loaded(job, payloads, exact, present_stored=present_stored, own_snapshot=own, turn_snapshot=turn)


def run_prefetch(store: StateStore, job: PrefetchJob, *, block_bytes: int, new_buffer: NewBuffer) -> Prefetched:
    """Blocks run by run up to the first that is missing."""
    payloads: list[memoryview] = []
    exact: list[bool] = []
    _fetch_on(store, job, job.keys, payloads, exact, new_buffer=partial(new_buffer, block_bytes), giver=None)
    return Prefetched(job, payloads, exact)


def _fetch_on(
    store: StateStore,
    job: LoadJob | PrefetchJob,
    wanted: Sequence[BlockKey],
    payloads: list[memoryview],
    exact: list[bool],
    *,
    new_buffer: Callable[[], memoryview],
    giver: str | None,
    worth_s: float | None = None,
) -> None:
    """Append the blocks that follow those present and fetched, up to the first that is missing."""
    runs = 1  # a miss costs one small read; a long prefix soon comes in large ones
    while job.blocks_present + len(payloads) < len(wanted):
        first = job.blocks_present + len(payloads)
        keys = wanted[first : first + runs * RUN_BLOCKS - first % RUN_BLOCKS]
        runs = min(2 * runs, FETCH_RUNS_MAX)
        buffers = [new_buffer() for _ in keys]
        fetched = store.fetch_blocks(
            keys,
            buffers,
            deadline=job.deadline,
            exact_only=job.exact_only,
            handed_off_by=giver,
            block_worth_s=worth_s,
        )
        payloads += buffers[: fetched.count]
        exact += fetched.exact[: fetched.count]
        if fetched.count < len(keys):
            return
