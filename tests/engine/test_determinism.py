"""Fidelity `exact`: the same tokens and the same log-probability bits, whatever the cache holds and wherever rows are
computed. Every case is compared with one cold rank that computes the prompt in one chunk, alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import (
    GREEDY,
    OPTIONS,
    SEEDED,
    Heard,
    World,
    decode,
    oracle,
    prefill,
    prompt_of,
)
from tests.engine.memory_store import MemoryStore
from whalepod.core.lifecycle import Phase
from whalepod.engine.interface import Fidelity, SampledToken, Work
from whalepod.engine.options import RankOptions
from whalepod.kvstore.value_format import PartKind, SnapshotValue
from whalepod.model.tensor_layout import ModelRole


def _said(heard: Heard) -> tuple[SampledToken, ...]:
    return tuple(heard.tokens)


@pytest.mark.parametrize("chunk_tokens", [pytest.param(2, marks=pytest.mark.slow), 7, 16, 33])
def test_chunking_changes_nothing(chunk_tokens: int) -> None:
    world = World(options=replace(OPTIONS, chunk_tokens=chunk_tokens))
    assert _said(world.generate(prompt_of(60), SEEDED)) == oracle(60, SEEDED)


def test_neighbours_change_nothing() -> None:
    world = World(options=replace(OPTIONS, chunk_tokens=24))
    heard = []
    for index, tokens in enumerate([60, 17, 45, 29]):
        heard.append((tokens, world.submit(world.request(prompt_of(tokens), (GREEDY, SEEDED)[index % 2]))))
        world.step()
    world.run()
    for index, (tokens, said) in enumerate(heard):
        assert _said(said) == oracle(tokens, (GREEDY, SEEDED)[index % 2])


def test_e15_one_changed_seed_changes_only_its_own_output() -> None:
    def answers(seeds: list[int]) -> list[tuple[SampledToken, ...]]:
        world = World()
        heard = [world.submit(world.request(prompt_of(29), replace(SEEDED, seed=seed))) for seed in seeds]
        world.run()
        return [_said(said) for said in heard]

    before, after = answers([1, 2, 3]), answers([1, 9, 3])
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]


@pytest.mark.parametrize("role", ModelRole)
def test_a_handoff_changes_nothing(role: ModelRole) -> None:
    """Prompts around W = 16 = B, K = 28 and the borders of what an encoder hands over, many at a time."""
    store, many = MemoryStore(), replace(OPTIONS, slots=8)
    cases = [(tokens, sampling) for tokens in (1, 17, 29, 45, 60) for sampling in (GREEDY, SEEDED)]
    before, after = World(store=store, options=many, role=role), World(store=store, options=many)
    prefilled = [
        before.submit(before.request(prompt_of(tokens), sampling, work=Work.PREFILL, name=f"case {index}"))
        for index, (tokens, sampling) in enumerate(cases)
    ]
    before.run()
    decoded = []
    for index, (tokens, sampling) in enumerate(cases):
        request = after.request(prompt_of(tokens), sampling, await_handoff=True, name=f"case {index}")
        decoded.append(after.submit(request))
        handoff = prefilled[index].handoff
        assert handoff is not None
        assert handoff.stored
        after.engine.hand_off(request.request_id, 1, handoff)
    after.run()
    for (tokens, sampling), heard in zip(cases, decoded, strict=True):
        assert _said(heard) == oracle(tokens, sampling)


def _zeroed(value: SnapshotValue, part: PartKind, *, first: int | None = None) -> SnapshotValue:
    """With the first bytes of a part, or all of it, set to 0."""
    data = bytearray(value.parts[part])
    data[:first] = bytes(len(data[:first]))
    return replace(value, parts={**value.parts, part: data})


WINDOW_ROW_BYTES = 64
"""Codes of one row of the first layer, whose rows come oldest first."""
SPOILT = {
    "all window rows": (PartKind.WINDOW_ROWS, None),
    "the oldest window row of one layer": (PartKind.WINDOW_ROWS, WINDOW_ROW_BYTES),
    "the unfinished group": (PartKind.GROUP_STATE, None),
    "entries of the unfinished block": (PartKind.GLOBAL_KV, None),
    "index keys of the unfinished block": (PartKind.INDEX_KEYS, None),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_snapshot_is_seen(what: str) -> None:
    """The control: everything that is handed over is used."""
    part, first = SPOILT[what]
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(61), name="x")
    assert part in store.snapshots[store.handoffs()[0]].parts
    store.changed = lambda value: _zeroed(value, part, first=first)
    assert _said(decode(World(store=store), prompt_of(61), handoff, name="x")) != oracle(61)


def _is_near(said: tuple[SampledToken, ...], truth: tuple[SampledToken, ...]) -> bool:
    """The same tokens; what is told about them may differ by rounding."""
    return [token.id for token in said] == [token.id for token in truth] and all(
        abs((mine.logprob or 0) - (its.logprob or 0)) < 1e-3 for mine, its in zip(said, truth, strict=True)
    )


def test_a_cold_request_in_fast_differs_by_rounding_only() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(45), SEEDED, name="x", fidelity=Fidelity.FAST)
    heard = decode(World(store=store), prompt_of(45), handoff, SEEDED, name="x", fidelity=Fidelity.FAST)
    assert _is_near(_said(heard), oracle(45, SEEDED))


def _warm_store(tokens: int, *, turns: bool) -> MemoryStore:
    """Holds the first `tokens` of the standard prompt, computed for a request of that length."""
    store = MemoryStore()
    World(store=store).generate(prompt_of(tokens), replace(GREEDY, max_tokens=1))
    if not turns:
        store.snapshots.clear()
    return store


@pytest.mark.parametrize(("tokens", "replayed"), [(60, 0), (77, 0), (92, 32)])
def test_a_hit_changes_nothing_with_turn_snapshots_near_the_end(tokens: int, replayed: int) -> None:
    # The prompt before had 64 tokens: turn snapshots lie at 32, 48 and 64. R is 32, 48 and 64.
    store = _warm_store(64, turns=True)
    if replayed:
        store.snapshots = {key: value for key, value in store.snapshots.items() if value.boundary_tokens == 32}
    heard = World(store=store).generate(prompt_of(tokens), SEEDED)
    assert heard.end.cached_tokens == 16 * ((tokens - 28) // 16)
    assert heard.end.replayed_tokens == (64 if replayed else 0)
    assert _said(heard) == oracle(tokens, SEEDED)


@pytest.mark.parametrize(("tokens", "replayed"), [(140, 105), (148, 97), (155, 90)])
def test_a_hit_changes_nothing_with_a_halo_of_exactly_the_rows_that_matter(tokens: int, replayed: int) -> None:
    store = _warm_store(124, turns=False)
    heard = World(store=store).generate(prompt_of(tokens), SEEDED)
    assert (heard.end.cached_tokens, heard.end.replayed_tokens) == (112, replayed)
    assert _said(heard) == oracle(tokens, SEEDED)


def test_a_turn_snapshot_of_a_request_that_replayed_serves_every_later_one() -> None:
    """A halo reaches as far as its own L needs. Windows that it left inexact must not be published."""
    store = _warm_store(124, turns=False)
    World(store=store).generate(prompt_of(155), replace(GREEDY, max_tokens=1))
    published = sorted(value.boundary_tokens for value in store.snapshots.values())
    assert published == [128, 144]
    for tokens in (156, 172):
        heard = World(store=store).generate(prompt_of(tokens), SEEDED)
        assert heard.end.replayed_tokens == 0
        assert _said(heard) == oracle(tokens, SEEDED)


def test_hits_on_the_device_change_nothing() -> None:
    world = World()
    world.generate(prompt_of(64), replace(GREEDY, max_tokens=1))
    for tokens in (60, 92):
        heard = world.generate(prompt_of(tokens), SEEDED)
        assert heard.end.cached_tokens == 16 * ((tokens - 28) // 16)
        assert _said(heard) == oracle(tokens, SEEDED)


def test_a_prefill_rank_that_hits_hands_over_the_same_state() -> None:
    for role in ModelRole:
        store = _warm_store(64, turns=True)
        handoff = prefill(World(store=store, role=role), prompt_of(77), SEEDED, name="x")
        assert handoff.cached_tokens == 48
        assert _said(decode(World(store=store), prompt_of(77), handoff, SEEDED, name="x")) == oracle(77, SEEDED)


LONG = replace(SEEDED, max_tokens=7)


def _crowded(options: RankOptions, *, fidelity: Fidelity = Fidelity.EXACT, shares: bool = True) -> tuple[World, int]:
    """Three requests in too few blocks, and how often one was preempted."""
    world, preempted = World(options=options), 0
    for seed in range(3):
        world.submit(
            world.request(prompt_of(61 + seed, seed=seed), LONG, fidelity=fidelity, name=f"r{seed}", shares=shares)
        )
    while world.engine.runnable:
        holding = {sequence: sequence.phase for sequence in world.engine._scheduler.holding}
        world.step()
        preempted += sum(
            phase is not Phase.WAITING and sequence.phase is Phase.WAITING for sequence, phase in holding.items()
        )
    return world, preempted


@pytest.mark.parametrize(
    ("parked_bytes", "shares", "fidelity"),
    [
        (1 << 30, True, Fidelity.EXACT),
        pytest.param(1 << 30, False, Fidelity.FAST, marks=pytest.mark.slow),
        pytest.param(0, True, Fidelity.EXACT, marks=pytest.mark.slow),
        (0, True, Fidelity.FAST),
        (0, False, Fidelity.EXACT),
    ],
    ids=["parked", "parked, nothing shared, fast", "from blocks", "from blocks, fast", "from nothing"],
)
def test_preemption_and_resumption_change_nothing(parked_bytes: int, shares: bool, fidelity: Fidelity) -> None:
    options = replace(OPTIONS, blocks=13, chunk_tokens=24, parked_bytes=parked_bytes)
    world, preempted = _crowded(options, fidelity=fidelity, shares=shares)
    assert preempted > 0
    for seed in range(3):
        name = f"r{seed}".encode().ljust(16)
        said = next(heard for request_id, heard in world.heard.items() if request_id == name)
        truth = oracle(61 + seed, LONG, seed=seed)
        assert _said(said) == truth if fidelity is Fidelity.EXACT else _is_near(_said(said), truth)
