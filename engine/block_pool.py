"""Owner of a rank's device blocks and window slots: who holds which, and what is free. Knows no tensor.

A block is in exactly one place: free; held (reference count > 0); or idle, which means unreferenced but still
findable by its content hash. Idle blocks count as free and are given away oldest first. A sequence gives its blocks
back deepest first, so a prefix is forgotten from its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whalepod.core.block_keys import BlockHash


@dataclass(slots=True)
class _Block:
    references: int = 0
    hash: BlockHash | None = None
    """Set while the block can be found by it."""
    exact: bool = False


class BlockPool:
    """Blocks 0 … blocks_total - 1."""

    def __init__(self, blocks_total: int) -> None:
        self._blocks = [_Block() for _ in range(blocks_total)]
        self._free: deque[int] = deque(range(blocks_total))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[BlockHash, int] = {}

    @property
    def blocks_total(self) -> int:
        return len(self._blocks)

    @property
    def blocks_free(self) -> int:
        """Blocks that `allocate` can give out: free and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, one reference each. The caller has seen that so many are free."""
        assert count <= self.blocks_free, f"{count} blocks wanted, {self.blocks_free} free"
        taken: list[int] = []
        for _ in range(count):
            block_id = self._free.popleft() if self._free else self._forget_oldest()
            self._blocks[block_id].references = 1
            taken.append(block_id)
        return taken

    def find(self, hashes: Sequence[BlockHash], *, exact_only: bool) -> list[int]:
        """The leading blocks of a chain that are here. Takes nothing: `retain` what will be used."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._index.get(block_hash)
            if block_id is None or (exact_only and not self._blocks[block_id].exact):
                break
            found.append(block_id)
        return found

    def is_exact(self, block_id: int) -> bool:
        """Whether a findable block never passed an approximate replay."""
        return self._blocks[block_id].exact

    def idle_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds: retaining them makes so many fewer free."""
        return sum(self._blocks[block_id].references == 0 for block_id in block_ids)

    def held_once_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would be free if their holder gave them back."""
        return sum(self._blocks[block_id].references == 1 for block_id in block_ids)

    def retain(self, block_ids: Iterable[int]) -> None:
        """One more reference to each. They must be held or idle."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.references == 0:
                del self._idle[block_id]
            block.references += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence, given in order of depth."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.references > 0, f"block {block_id} was released twice"
            block.references -= 1
            if block.references:
                continue
            if block.hash is None:
                self._free.append(block_id)
            else:
                self._idle[block_id] = None

    def commit(self, block_id: int, block_hash: BlockHash, *, exact: bool) -> None:
        """Make a held block, full of committed rows that will never be rewritten, findable.

        The first block of a hash stays the findable one, unless it is approximate and this one is exact.
        """
        block = self._blocks[block_id]
        assert block.references > 0, f"block {block_id} is not held"
        known = self._index.get(block_hash)
        if known == block_id or (known is not None and (self._blocks[known].exact or not exact)):
            return
        if known is not None:
            self._unindex(known)
        block.hash, block.exact = block_hash, exact
        self._index[block_hash] = block_id

    def forget_idle(self) -> None:
        """Drop every block that is kept for reuse only."""
        while self._idle:
            self._free.append(self._forget_oldest())

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place and is held by exactly the sequences with these tables."""
        held = Counter(block_id for table in tables for block_id in table)
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free)
        assert not free & idle
        for block_id, block in enumerate(self._blocks):
            assert block.references == held[block_id], f"block {block_id}: {block.references} != {held[block_id]}"
            assert (block.references == 0) == (block_id in free or block_id in idle)
            assert block.hash is None or self._index[block.hash] == block_id
            assert block_id not in idle or block.hash is not None
            assert block_id not in free or block.hash is None
        assert sum(block.hash is not None for block in self._blocks) == len(self._index)

    def _forget_oldest(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        block = self._blocks[block_id]
        assert block.hash is not None
        del self._index[block.hash]
        block.hash, block.exact = None, False
        return block_id

    def _unindex(self, block_id: int) -> None:
        """The block can no longer be found; if it was idle, it is plainly free."""
        block = self._blocks[block_id]
        assert block.hash is not None
        del self._index[block.hash]
        block.hash, block.exact = None, False
        if block_id in self._idle:
            del self._idle[block_id]
            self._free.append(block_id)


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to a window ring. `generation` tells this holder from those before it: late answers carry the old
    one."""

    index: int
    generation: int

    @property
    def holder(self) -> tuple[int, int]:
        return self.index, self.generation


class SlotPool:
    """Slots 0 … slots_total - 1."""

    def __init__(self, slots_total: int) -> None:
        self._generations = [0] * slots_total
        self._free = list(range(slots_total))[::-1]

    @property
    def slots_total(self) -> int:
        return len(self._generations)

    @property
    def slots_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Slot:
        """Take a slot. The caller has seen that one is free."""
        index = self._free.pop()
        self._generations[index] += 1
        return Slot(index, self._generations[index])

    def release(self, slot: Slot) -> None:
        assert self._generations[slot.index] == slot.generation, "a slot was released by an earlier holder"
        assert slot.index not in self._free, f"slot {slot.index} was released twice"
        self._free.append(slot.index)

    def check(self, held: Iterable[Slot]) -> None:
        """Assert that every slot is free or held by exactly one of these."""
        indexes = [slot.index for slot in held]
        assert sorted(indexes + self._free) == list(range(self.slots_total))
