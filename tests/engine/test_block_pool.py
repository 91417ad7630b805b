"""Blocks and slots are conserved, and prefixes are forgotten from their end."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from whalepod.core.block_keys import BlockHash
from whalepod.engine.block_pool import BlockPool, Slot, SlotPool


def _hash(*path: int) -> BlockHash:
    return BlockHash(bytes(path).ljust(32, b"\0"))


def _chain(pool: BlockPool, blocks: list[int], *path: int, exact: bool = True) -> list[BlockHash]:
    """Commit `blocks` as a chain."""
    hashes = [_hash(*path, depth + 1) for depth in range(len(blocks))]
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block_id, block_hash, exact=exact)
    return hashes


def test_a_released_prefix_is_found_again_and_costs_no_other_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    hashes = _chain(pool, blocks)
    pool.release(blocks)
    assert pool.blocks_free == 4
    found = pool.find(hashes, exact_only=True)
    assert found == blocks
    assert pool.idle_among(found) == 2
    pool.retain(found)
    assert pool.blocks_free == 2
    pool.check([found])


def test_a_prefix_is_found_up_to_the_first_block_that_is_gone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    hashes = _chain(pool, blocks)
    pool.release(blocks)
    pool.release(pool.allocate(1))
    assert pool.find(hashes, exact_only=False) == blocks[:2]


def test_the_deepest_block_of_the_oldest_prefix_goes_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    old_hashes, new_hashes = _chain(pool, old, 1), _chain(pool, new, 2)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.find(old_hashes, exact_only=False) == old[:1]
    assert pool.allocate(2) == [old[0], new[1]]
    assert pool.find(new_hashes, exact_only=False) == new[:1]


def test_plainly_free_blocks_are_used_before_a_prefix_is_forgotten() -> None:
    pool = BlockPool(3)
    kept = pool.allocate(1)
    hashes = _chain(pool, kept)
    pool.release(kept)
    pool.allocate(2)
    assert pool.find(hashes, exact_only=False) == kept


def test_a_shared_block_stays_while_anyone_holds_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate(1)
    hashes = _chain(pool, block)
    pool.retain(block)
    assert pool.held_once_among(block) == 0
    pool.release(block)
    assert pool.blocks_free == 1
    pool.allocate(1)
    assert pool.find(hashes, exact_only=False) == block
    pool.check([block, [1]])


def test_the_first_block_of_a_hash_stays_findable() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    hashes = _chain(pool, first)
    _chain(pool, second)
    assert pool.find(hashes, exact_only=False) == first
    pool.release(second)
    assert pool.blocks_free == 1
    pool.check([first])


def test_an_exact_block_takes_the_place_of_an_approximate_one_and_never_the_reverse() -> None:
    pool = BlockPool(3)
    approximate, exact, another = (pool.allocate(1) for _ in range(3))
    hashes = _chain(pool, approximate, exact=False)
    assert pool.find(hashes, exact_only=True) == []
    pool.release(approximate)
    _chain(pool, exact)
    assert pool.find(hashes, exact_only=True) == exact
    _chain(pool, another, exact=False)
    assert pool.find(hashes, exact_only=False) == exact
    pool.check([exact, another])


def test_forgetting_what_is_idle_leaves_what_is_held() -> None:
    pool = BlockPool(4)
    held, idle = pool.allocate(2), pool.allocate(2)
    held_hashes, idle_hashes = _chain(pool, held, 1), _chain(pool, idle, 2)
    pool.release(idle)
    pool.forget_idle()
    assert pool.find(idle_hashes, exact_only=False) == []
    assert pool.find(held_hashes, exact_only=False) == held
    pool.check([held])


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_slots_next_holder_has_another_generation() -> None:
    slots = SlotPool(1)
    first = slots.acquire()
    slots.release(first)
    second = slots.acquire()
    assert (second.index, second.generation) == (first.index, first.generation + 1)
    with pytest.raises(AssertionError):
        slots.release(first)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with some prefix, grow, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.slots = SlotPool(4)
        self.held: list[tuple[Slot, list[int], list[BlockHash]]] = []

    @precondition(lambda self: self.slots.slots_free)
    @rule(family=st.integers(0, 2), length=st.integers(0, 5), exact_only=st.booleans())
    def arrive(self, family: int, length: int, exact_only: bool) -> None:
        hashes = [_hash(family, depth + 1) for depth in range(length)]
        shared = self.pool.find(hashes, exact_only=exact_only)
        if length - len(shared) + self.pool.idle_among(shared) > self.pool.blocks_free:
            return
        self.pool.retain(shared)
        blocks = shared + self.pool.allocate(length - len(shared))
        self.held.append((self.slots.acquire(), blocks, hashes))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), exact=st.booleans(), depth=st.integers(0, 4))
    def commit(self, which: int, exact: bool, depth: int) -> None:
        _, blocks, hashes = self.held[which % len(self.held)]
        if depth < len(blocks) and not self.pool.find(hashes[: depth + 1], exact_only=False)[depth:]:
            self.pool.commit(blocks[depth], hashes[depth], exact=exact)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        slot, blocks, _ = self.held.pop(which % len(self.held))
        self.slots.release(slot)
        self.pool.release(blocks)

    @invariant()
    def conserved(self) -> None:
        self.pool.check([blocks for _, blocks, _ in self.held])
        self.slots.check([slot for slot, _, _ in self.held])


TestPoolMachine = PoolMachine.TestCase
