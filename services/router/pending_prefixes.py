"""Prefixes that are being computed now, so that whoever needs the same one waits for it and does not compute it again.

    dispatch ──▶ begin ──▶ (followers: longest ──▶ wait) ──▶ end: stored, or not

A prefix that has just been stored is remembered for a while: who looked the store up before it was there learns of it.
Times are monotonic seconds. Bounded; forgetting costs a computation.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockHash

REMEMBERED_S = 10.0
"""How long a stored prefix is known without asking the store."""

BLOCKS_MAX = 1 << 18
"""Blocks in the table: 32 MiB of them."""


Name = tuple[int, int]
"""A computation among the processes of a router: its number, and which of them it is of."""


@dataclass(slots=True, eq=False)
class Pending:
    """A prompt that is being computed. `expected_s`: when all of it should be. `name`: of one that is read from the
    memory of all processes; None: it is this one's."""

    first_block: int
    blocks: int
    began_s: float
    expected_s: float
    stored: bool | None = None
    """None: it is being computed."""
    ended_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    name: Name | None = None

    def is_current(self, now_s: float) -> bool:
        """It goes on, or what it stored is remembered."""
        return self.stored is None or (self.stored and now_s - self.ended_s <= REMEMBERED_S)

    def end(self, *, stored: bool, now_s: float) -> None:
        """Once; later calls do nothing."""
        if self.stored is None:
            self.stored, self.ended_s = stored, now_s
            self.ended.set()

    def expected_at_s(self, depth_blocks: int) -> float:
        """When its first `depth_blocks` blocks should be there: they are computed one after another."""
        share = (depth_blocks - self.first_block) / max(1, self.blocks - self.first_block)
        return self.began_s + (self.expected_s - self.began_s) * min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class Share:
    """What of a prompt somebody else computes, or has just computed. `exact`: not a block more."""

    depth_blocks: int
    pending: Pending
    exact: bool = True


class PendingPrefixes:
    """For one event loop."""

    def __init__(self, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._by_block: OrderedDict[BlockHash, Pending] = OrderedDict()
        self._blocks_max = blocks_max

    def __len__(self) -> int:
        return len(self._by_block)

    def begin(self, hashes: Sequence[BlockHash], *, stored_blocks: int, now_s: float, seconds: float) -> Pending:
        """A rank computes the blocks after the first `stored_blocks`. Blocks that another computes stay the other's."""
        pending = Pending(stored_blocks, len(hashes), began_s=now_s, expected_s=now_s + seconds)
        for block in hashes[stored_blocks:]:
            known = self._by_block.get(block)
            if known is None or known.stored is not None:
                self._by_block[block] = pending
                self._by_block.move_to_end(block)
        while len(self._by_block) > self._blocks_max:
            self._by_block.popitem(last=False)
        return pending

    def end(self, pending: Pending, *, stored: bool, now_s: float) -> None:
        """The computation is over: all of it is stored, or nobody knows. Once; later calls do nothing."""
        pending.end(stored=stored, now_s=now_s)

    def longest(self, hashes: Sequence[BlockHash], *, stored_blocks: int, now_s: float) -> Share | None:
        """The longest prefix beyond what is stored that is being computed, or was stored a moment ago.

        A block is in the table only behind others that are there or stored, so the depth is found by halving.
        """
        depth = bisect_left(
            range(stored_blocks, len(hashes)), True, key=lambda index: self._at(hashes[index], now_s) is None
        )
        depth += stored_blocks
        pending = self._at(hashes[depth - 1], now_s) if depth > stored_blocks else None
        return Share(depth, pending) if pending is not None else None

    def _at(self, block: BlockHash, now_s: float) -> Pending | None:
        pending = self._by_block.get(block)
        if pending is None or pending.is_current(now_s):
            return pending
        del self._by_block[block]
        return None
