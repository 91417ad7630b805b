"""Blocks that are stored are on their way to the decode rank before the rest of the prompt is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, oracle, prefill, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.engine.interface import EngineRequest, Fidelity, Handoff
from whalepod.engine.options import RankOptions

TOKENS = 135
"""Eight blocks of 16 and a part of one."""


class Cluster:
    """A prompt of which all or a part is stored, its hand-off, and a decode rank told to await it."""

    def __init__(
        self, *, stored_tokens: int, options: RankOptions = OPTIONS, fidelity: Fidelity = Fidelity.FAST
    ) -> None:
        self.store = MemoryStore()
        prefills = World(store=self.store)
        prefill(prefills, prompt_of(TOKENS)[:stored_tokens], fidelity=fidelity)
        self.decodes = World(store=self.store, options=options)
        self.request: EngineRequest = replace(
            self.decodes.request(prompt_of(TOKENS), GREEDY, fidelity=fidelity, await_handoff=True, name="it"),
            stored_tokens=stored_tokens,
        )
        self.heard = self.decodes.submit(self.request)
        self.store.calls.clear()
        self.decodes.run()
        self.calls_before = list(self.store.calls)
        self.handoff: Handoff = prefill(prefills, prompt_of(TOKENS), fidelity=fidelity, name="it")
        self.store.calls.clear()

    def finish(self) -> list[int]:
        self.decodes.engine.hand_off(self.request.request_id, 1, self.handoff)
        self.decodes.run()
        return self.heard.ids

    def fetched_blocks(self, calls: list[str]) -> int:
        return sum(int(call.split()[1]) for call in calls if call.startswith("fetch"))


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_what_is_stored_is_fetched_before_the_hand_off_and_the_rest_with_it(fidelity: Fidelity) -> None:
    cluster = Cluster(stored_tokens=96, fidelity=fidelity)
    assert cluster.fetched_blocks(cluster.calls_before) == 6
    assert not cluster.heard.tokens
    ids = cluster.finish()
    assert cluster.fetched_blocks(cluster.store.calls) == 2
    if fidelity is Fidelity.EXACT:
        assert ids == [token.id for token in oracle(TOKENS)]


def test_a_prompt_without_a_stored_prefix_asks_for_nothing_before_its_hand_off() -> None:
    cluster = Cluster(stored_tokens=0 + 8)
    assert cluster.calls_before == []
    assert len(cluster.finish()) == 4


def test_blocks_that_are_gone_by_then_are_fetched_with_the_hand_off() -> None:
    cluster = Cluster(stored_tokens=96)
    lost = Cluster(stored_tokens=96, options=replace(OPTIONS, prefetch_bytes=0))
    assert lost.calls_before == []
    assert lost.finish() == cluster.finish()
    assert lost.fetched_blocks(lost.store.calls) == 8


def test_the_budget_bounds_what_is_held_and_is_given_back() -> None:
    block_bytes = World(store=MemoryStore()).engine._restorer._prefetcher._block_bytes  # type: ignore[union-attr]
    cluster = Cluster(stored_tokens=96, options=replace(OPTIONS, prefetch_bytes=4 * block_bytes))
    prefetcher = cluster.decodes.engine._restorer._prefetcher
    assert prefetcher is not None
    assert cluster.fetched_blocks(cluster.calls_before) == 4
    assert prefetcher.blocks_free == 0
    cluster.finish()
    assert prefetcher.blocks_free == 4


def test_a_request_that_ends_meanwhile_gives_its_room_back() -> None:
    cluster = Cluster(stored_tokens=96)
    prefetcher = cluster.decodes.engine._restorer._prefetcher
    assert prefetcher is not None
    before = prefetcher.blocks_free
    cluster.decodes.engine.cancel(cluster.request.request_id, 1)
    assert prefetcher.blocks_free == before + 6
    cluster.decodes.run()


def test_an_answer_that_comes_after_the_hand_off_is_dropped() -> None:
    store = MemoryStore()
    prefills = World(store=store)
    prefill(prefills, prompt_of(96))
    decodes = World(store=store)
    request = replace(decodes.request(prompt_of(TOKENS), await_handoff=True, name="it"), stored_tokens=96)
    heard = decodes.submit(request)
    decodes.engine.hand_off(request.request_id, 1, prefill(prefills, prompt_of(TOKENS), name="it"))
    decodes.run()
    assert heard.ids == [token.id for token in oracle(TOKENS)]


@pytest.mark.parametrize("moment", ["prefetching", "prefetched", "loading"])
def test_a4_a_request_given_up_at_any_moment_of_its_transfer_gives_back_every_block(moment: str) -> None:
    store = MemoryStore()
    prefills, decodes = World(store=store), World(store=store)
    prefill(prefills, prompt_of(96))
    handoff = prefill(prefills, prompt_of(TOKENS), name="it")
    prefetcher = decodes.engine._restorer._prefetcher
    assert prefetcher is not None
    before = (decodes.engine.load().blocks_free, prefetcher.blocks_free)
    for attempt in range(1, 4):
        request = replace(
            decodes.request(prompt_of(TOKENS), await_handoff=True, name="it", attempt=attempt), stored_tokens=96
        )
        decodes.submit(request)
        if moment != "prefetching":
            decodes.step()
        if moment == "loading":
            decodes.engine.hand_off(request.request_id, attempt, handoff)
            decodes.engine.step()
        decodes.engine.cancel(request.request_id, attempt)
        decodes.run()
        assert (decodes.engine.load().blocks_free, prefetcher.blocks_free) == before
