"""A request that was handed off and then has to give up what it holds goes on by itself: no prefill rank is asked
again, so none can be the wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, prefill, prompt_of
from tests.engine.eviction_fuzz import hash_oracle, of_hashes
from tests.engine.memory_store import MemoryStore
from whalepod.engine.interface import FinishReason

LONG = replace(GREEDY, max_tokens=40)


@pytest.mark.parametrize("parked_bytes", [0, 1 << 30], ids=["computed again", "parked"])
def test_a10_a_preempted_request_says_the_same_whichever_of_four_prefill_ranks_it_came_from(parked_bytes: int) -> None:
    store = MemoryStore()
    prefills = [World(store=store, instrument=of_hashes) for _ in range(4)]
    options = replace(OPTIONS, slots=4, blocks=12, parked_bytes=parked_bytes)
    decode = World(store=store, options=options, instrument=of_hashes)
    asked = []
    for seed, rank in enumerate(prefills):
        name, prompt = f"r{seed}", prompt_of(40, seed=seed)
        handoff = prefill(rank, prompt, LONG, name=name)
        assert handoff.stored
        request = decode.request(prompt, LONG, name=name, await_handoff=True)
        asked.append((seed, decode.submit(request)))
        decode.engine.hand_off(request.request_id, 1, handoff)
    before = [rank.engine.load() for rank in prefills]
    decode.run()
    assert decode.engine.preempted > 0
    for seed, heard in asked:
        assert heard.end.reason is FinishReason.LENGTH
        assert tuple(heard.tokens) == hash_oracle(40, LONG, seed)
    assert [rank.engine.load() for rank in prefills] == before, "they were not asked again"
    assert store.handoffs() == []
    load = decode.engine.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)
