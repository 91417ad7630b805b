"""A store that loses blocks and snapshots at any moment, between any two calls: in `exact`, nobody can tell."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, World, decode, oracle, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.core.ids import Incarnation
from whalepod.engine.interface import Fidelity
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.faulty_transport import Fault, FaultSchedule, FaultyTransport, VirtualClock
from whalepod.kvstore.settings import StoreSettings

FEW_BLOCKS = replace(OPTIONS, blocks=12)
"""The device soon forgets: what is hit comes from the store."""
LENGTHS = (20, 49, 75, 96, 130)


class Lossy:
    """Two ranks that share a store, which loses a value at every third or so of its steps."""

    def __init__(self, seed: int, *, rate: float = 0.3) -> None:
        clock = VirtualClock()
        self.transport = FaultyTransport(FaultSchedule(seed=seed, rates={Fault.EVICT: rate}), clock)
        model = tiny_model()
        self.client = KvClient(
            StoreSettings(missing_life_s=0.0),
            namespace=model.namespace,
            layout=model.block_layout,
            incarnation=Incarnation(1),
            clock=clock,
            transport=self.transport,
        )
        self.ranks = [World(store=self.client, options=FEW_BLOCKS) for _ in range(2)]


def play(lossy: Lossy, draw: Random) -> int:
    """One request, on one rank or over two; its answer is that of a rank without a store. Tokens that it had hit."""
    tokens, seed, sampling = draw.choice(LENGTHS), draw.randrange(2), draw.choice((GREEDY, SEEDED))
    prompt, first = prompt_of(tokens, seed=seed), draw.choice(lossy.ranks)
    if draw.random() < 0.5:
        heard = first.generate(prompt, sampling, fidelity=Fidelity.EXACT)
    else:
        name = f"r{draw.getrandbits(40):x}"
        handoff = prefill(first, prompt, sampling, name=name)
        other = next(rank for rank in lossy.ranks if rank is not first)
        heard = decode(other, prompt, handoff, sampling, name=name)
    assert tuple(heard.tokens) == oracle(tokens, sampling, seed=seed)
    return heard.end.cached_tokens


def test_f15_f16_lost_blocks_and_snapshots_change_no_token() -> None:
    lossy, draw = Lossy(1), Random(1)
    assert sum(play(lossy, draw) for _ in range(4)) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f15_f16_lost_blocks_and_snapshots_change_no_token_in_two_hundred_rounds() -> None:
    lossy, draw = Lossy(2), Random(2)
    hits = [play(lossy, draw) for _ in range(200)]
    assert sum(hit > 0 for hit in hits) > 50
    assert sum(hit == 0 for hit in hits) > 20
    assert lossy.transport.steps > 2000


def test_f27_a_snapshot_of_another_kind_costs_its_rows_and_no_token() -> None:
    store = MemoryStore(changed=lambda value: replace(value, mode=value.mode ^ 1))
    handoff = prefill(World(store=store), prompt_of(75))
    heard = decode(World(store=store), prompt_of(75), handoff)
    assert tuple(heard.tokens) == oracle(75)
    assert "get_snapshot" in store.calls
