"""What a request's own prefill has stored is no hit, whatever became of the hand-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.engine.engine_world import World, decode, oracle, prefill, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.core.clock import Deadline
from whalepod.kvstore.client import BlockToPut


class DeafWriters(MemoryStore):
    """Takes every block, and its answer is lost."""

    def put_blocks(self, blocks: Sequence[BlockToPut], *, deadline: Deadline) -> int:
        super().put_blocks(blocks, deadline=deadline)
        return 0


def test_blocks_that_a_prefill_has_stored_without_hearing_so_are_no_hit() -> None:
    store = DeafWriters()
    handoff = prefill(World(store=store), prompt_of(100), name="x")
    assert (handoff.stored, handoff.blocks_stored, len(store.blocks)) == (False, 0, 4)
    heard = decode(World(store=store), prompt_of(100), handoff, name="x")
    assert tuple(heard.tokens) == oracle(100)
    assert heard.end.cached_tokens == 0


def test_blocks_that_are_there_without_a_prefill_are_a_hit() -> None:
    store = DeafWriters()
    handoff = prefill(World(store=store), prompt_of(100), name="x")
    nobody = replace(handoff, prefilled=False)
    assert decode(World(store=store), prompt_of(100), nobody, name="y").end.cached_tokens == 64
