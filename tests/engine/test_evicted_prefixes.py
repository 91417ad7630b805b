"""A store that loses blocks and snapshots at any moment, between any two calls: in `exact`, nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.engine.engine_world import World, decode, oracle, prefill, prompt_of
from tests.engine.eviction_fuzz import Lossy, fuzz, play, tiny_oracle
from tests.engine.memory_store import MemoryStore
from whalepod.core.block_keys import BlockKey
from whalepod.engine.boundaries import Boundaries
from whalepod.engine.state_image import StateImage
from whalepod.kvstore import client
from whalepod.model.config import ModelConfig

LENGTHS = (20, 49, 75, 96, 130)


def said(lossy: Lossy, draw: Random) -> int:
    """One round with the tiny network. Tokens that it had hit."""
    right, hit = play(lossy, draw, LENGTHS, tiny_oracle)
    assert right
    return hit


def test_f15_f16_lost_blocks_and_snapshots_change_no_token() -> None:
    lossy, draw = Lossy(1), Random(1)
    assert sum(said(lossy, draw) for _ in range(4)) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f15_f16_lost_blocks_and_snapshots_change_no_token_in_two_hundred_rounds() -> None:
    lossy, draw = Lossy(2), Random(2)
    hits = [said(lossy, draw) for _ in range(200)]
    assert sum(hit > 0 for hit in hits) > 50
    assert sum(hit == 0 for hit in hits) > 20
    assert lossy.transport.steps > 2000


def test_f15_f16_lost_blocks_and_snapshots_change_no_token_of_a_network_of_hashes() -> None:
    figures = fuzz(30, seed=1)
    assert figures["wrong"] == 0
    assert min(figures["hit"], figures["missed"], figures["lost"]) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f15_f16_lost_blocks_and_snapshots_change_no_token_of_a_network_of_hashes_in_five_thousand_rounds() -> None:
    figures = fuzz(5000, seed=2)
    assert figures["wrong"] == 0
    assert min(figures["hit"], figures["missed"], figures["lost"]) > 1000


def _short_halo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelConfig, "halo_rows", lambda self, *, boundary, floor: min(boundary, 5 * self.window))


def _snapshot_without_its_first_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Boundaries, "window_start", lambda self, boundary: max(0, boundary - self.config.window + 2))


def _blocks_in_another_place(patch: pytest.MonkeyPatch) -> None:
    place = StateImage.import_block
    patch.setattr(StateImage, "import_block", lambda self, block_id, payload: place(self, block_id ^ 1, payload))


def _evicted_blocks_that_count(patch: pytest.MonkeyPatch) -> None:
    """A fetch that trusts its lookup."""
    fetch = client.KvClient.fetch_blocks

    def all_of(
        self: client.KvClient, keys: Sequence[BlockKey], buffers: Sequence[memoryview], **how: Any
    ) -> client.Fetched:
        found = fetch(self, keys, buffers, **how)
        return replace(found, count=len(keys), exact=(True,) * len(keys)) if found.count else found

    patch.setattr(client.KvClient, "fetch_blocks", all_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [_short_halo, _snapshot_without_its_first_row, _blocks_in_another_place, _evicted_blocks_that_count],
    ids=lambda plant: plant.__name__,
)
def test_a_restore_that_is_wrong_somewhere_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fuzz(1, seed=5)
    plant(monkeypatch)
    assert fuzz(100, seed=5)["wrong"] > 0


def test_f27_a_snapshot_of_another_kind_costs_its_rows_and_no_token() -> None:
    store = MemoryStore(changed=lambda value: replace(value, mode=value.mode ^ 1))
    handoff = prefill(World(store=store), prompt_of(75))
    heard = decode(World(store=store), prompt_of(75), handoff)
    assert tuple(heard.tokens) == oracle(75)
    assert "get_snapshot" in store.calls
