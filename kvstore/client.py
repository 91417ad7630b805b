"""The store as engines and routers see it: lookups, blocks and snapshots. Synchronous and thread-safe.

Nothing here raises for a fault of the store. Absent, slow, full, wrong or away: each is a miss or a write that was not taken,
counted in `metrics.py`, and the caller computes. Every call ends by its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import Incarnation
from .settings import StoreSettings
from .value_format import BlockLayout, BytesLike, SnapshotValue


@dataclass(frozen=True, slots=True)
class Fetched:
    """The leading blocks that arrived and were verified. `exact[i]`: block i never passed an approximate replay."""

    count: int
    exact: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BlockToPut:
    """A block and its payload, in one piece or in pieces that follow each other; `layout.payload_bytes` in total."""

    key: BlockKey
    payload: BytesLike | Sequence[BytesLike]
    exact: bool


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
    Close it once, after its last call has returned.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        namespace: bytes,
        layout: BlockLayout | None = None,
        incarnation: Incarnation,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        raise NotImplementedError

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> int:
        """How many leading blocks of the chain `keys` (depth 0 first) are stored. A guess: only a fetch confirms it.

        Two round trips at most: one probes the first block of every run, one the blocks of the last run found.
        """
        raise NotImplementedError

    def fetch_blocks(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], *, deadline: Deadline, exact_only: bool = False
    ) -> Fetched:
        """Read the leading blocks of `keys` into `buffers`, one writable buffer of `layout.payload_bytes` a key.

        The result counts the blocks before the first that is missing, late or wrong (or, with `exact_only`, approximate).
        Buffers past that hold anything. Nothing writes to a buffer after this has returned. A hit renews the block's life.
        """
        raise NotImplementedError

    def put_blocks(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        """Store blocks; returns how many *leading* ones the store is known to hold. Fewer than all: some may be missing.

        A block that somebody stored before counts as held and its life is renewed. An exact block replaces an approximate
        one, never the reverse; nothing else is ever overwritten. Raises ValueError on a payload of the wrong size.
        """
        raise NotImplementedError

    def put_snapshot(self, key: bytes, value: SnapshotValue, *, ttl_s: float, deadline: Deadline) -> bool:
        """Store a snapshot under a key of `store_keys.py`, over any earlier one. True: the store has acknowledged it.

        Raises ValueError if it is above `value_bytes_max`.
        """
        raise NotImplementedError

    def get_snapshot(self, key: bytes, *, deadline: Deadline, unlink: bool = False) -> SnapshotValue | None:
        """The snapshot under `key`, verified, or None. `unlink` removes it after it has been read (hand-offs)."""
        raise NotImplementedError

    def unlink(self, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        """Remove values by their Redis keys; returns how many were there, as far as the store has answered."""
        raise NotImplementedError

    def health(self) -> tuple[ShardHealth, ...]:
        """One entry a shard, without asking the store."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """Every shard is available, as far as this process knows. True if there is no store."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
