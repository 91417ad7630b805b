"""One engine stepped by hand: what is reported, when a request ends, and that everything is given back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, decode, oracle, prefill, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.core.errors import DeadlineError, StaleAttemptError
from whalepod.engine.interface import (
    Fidelity,
    FinishReason,
    Handoff,
    HandoffEvent,
    SnapshotKind,
    StepEvent,
    TokensEvent,
    Work,
)
from whalepod.kvstore.settings import RETENTION_S_MAX
from whalepod.kvstore.value_format import PartKind
from whalepod.model.tensor_layout import ModelRole

ONE = replace(GREEDY, max_tokens=1)


def _greedy_ids() -> list[int]:
    """What the model says after the standard short prompt."""
    return [token.id for token in oracle(20)]


def _nothing_held(world: World) -> None:
    load = world.engine.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)


# Ends


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_b1_b2_exactly_max_tokens_come_out_one_event_a_step(max_tokens: int) -> None:
    world = World()
    heard = world.generate(prompt_of(20), replace(GREEDY, max_tokens=max_tokens))
    assert len(heard.tokens) == max_tokens
    assert heard.end.reason is FinishReason.LENGTH
    _nothing_held(world)


def test_a_stop_id_ends_the_request_and_is_named() -> None:
    ids = _greedy_ids()
    heard = World().generate(prompt_of(20), replace(GREEDY, stop_token_ids=(ids[2],)))
    assert heard.ids == ids[:3]
    assert (heard.end.reason, heard.end.matched_stop_id) == (FinishReason.STOP, ids[2])


def test_the_context_ends_the_request() -> None:
    world = World(options=replace(OPTIONS, context_tokens_max=24))
    heard = world.generate(prompt_of(20), replace(GREEDY, max_tokens=None))
    assert len(heard.tokens) == 4
    assert heard.end.reason is FinishReason.LENGTH


def test_a_request_out_of_time_ends_with_a_deadline_error_wherever_it_is() -> None:
    world = World(options=replace(OPTIONS, slots=1))
    running = world.submit(world.request(prompt_of(20), replace(GREEDY, max_tokens=500)))
    world.step()
    late = [
        world.submit(world.request(prompt_of(20), timeout_s=0)),
        world.submit(world.request(prompt_of(20), timeout_s=0, await_handoff=True)),
    ]
    world.step()
    for heard in late:
        assert heard.end.reason is FinishReason.ERROR
        assert isinstance(heard.end.error, DeadlineError)
    assert not running.ends


def test_a_cancelled_request_says_nothing_more_and_gives_everything_back() -> None:
    world = World()
    request = world.request(prompt_of(50))
    heard = world.submit(request)
    world.step()
    world.engine.cancel(request.request_id, 2)
    assert world.engine.load().running == 1
    world.engine.cancel(request.request_id, 1)
    world.engine.cancel(request.request_id, 1)
    said = len(heard.tokens)
    world.run()
    assert (len(heard.tokens), heard.ends) == (said, [])
    _nothing_held(world)


def test_a_request_can_be_ended_from_outside_with_a_reason() -> None:
    world = World()
    request = world.request(prompt_of(50))
    heard = world.submit(request)
    world.engine.fail(request.request_id, 1, StaleAttemptError("newer"))
    world.run()
    assert isinstance(heard.end.error, StaleAttemptError)


# Prefill and hand-off


def test_a_prefill_is_stored_before_its_handoff_is_reported() -> None:
    store = MemoryStore()
    world = World(store=store)
    request = world.request(prompt_of(50), work=Work.PREFILL)
    world.submit(request)
    events, stored = list[StepEvent](), (0, 0)
    while not events:
        stored = len(store.blocks), len(store.handoffs())
        events = world.step()
    assert stored == (3, 1)
    handoff = world.heard[request.request_id].handoff
    assert handoff is not None
    assert (handoff.boundary_tokens, handoff.kind, handoff.stored, handoff.blocks_stored) == (
        50,
        SnapshotKind.FULL,
        True,
        3,
    )
    assert world.heard[request.request_id].end.reason is FinishReason.STOP
    assert isinstance(events[0], HandoffEvent)
    _nothing_held(world)


def test_an_encoder_hands_over_below_the_kept_rows_and_draws_no_token() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store, role=ModelRole.ENCODER), prompt_of(61))
    assert (handoff.boundary_tokens, handoff.kind, handoff.first_token) == (32, SnapshotKind.ENCODER, None)
    assert len(store.blocks) == 2


def test_an_encoder_has_nothing_to_hand_over_for_a_short_prompt() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store, role=ModelRole.ENCODER), prompt_of(29))
    assert (handoff.boundary_tokens, handoff.kind, handoff.stored) == (0, None, True)
    assert not store.calls


def test_b4_a_first_token_that_ends_the_request_needs_no_handoff() -> None:
    store = MemoryStore()
    world = World(store=store)
    handoff = prefill(world, prompt_of(20), ONE, name="x")
    assert handoff.first_token is not None
    assert (handoff.finish_reason, handoff.kind, handoff.boundary_tokens) == (FinishReason.LENGTH, None, 0)
    assert not store.handoffs()
    assert len(store.blocks) == 1
    heard = decode(World(store=store), prompt_of(20), handoff, ONE, name="x")
    assert heard.ids == [handoff.first_token.id]
    assert heard.end.reason is FinishReason.LENGTH


def test_a_store_that_takes_nothing_is_told_truthfully_and_decode_computes_the_prompt() -> None:
    store = MemoryStore(takes=lambda: False)
    handoff = prefill(World(store=store), prompt_of(50), name="x")
    assert (handoff.stored, handoff.kind, handoff.boundary_tokens, handoff.first_token) == (False, None, 0, None)
    heard = decode(World(store=store), prompt_of(50), handoff, name="x")
    assert tuple(heard.tokens) == oracle(50)
    assert (heard.end.reason, heard.end.cached_tokens) == (FinishReason.LENGTH, 0)


def test_without_a_store_a_prefill_says_so() -> None:
    handoff = prefill(World(), prompt_of(50))
    assert (handoff.stored, handoff.kind) == (False, None)


def test_a_full_write_queue_delays_a_handoff_and_loses_nothing() -> None:
    store = MemoryStore()
    world = World(store=store, options=replace(OPTIONS, publish_queue_bytes=1))
    handoff = prefill(world, prompt_of(100))
    assert handoff.stored
    assert handoff.blocks_stored == 6


def test_the_reader_unlinks_the_handoff_once_it_has_restored_it() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(50), name="x")
    (key,) = store.handoffs()
    assert store.lives[key] == RETENTION_S_MAX
    heard = decode(World(store=store), prompt_of(50), handoff, name="x")
    assert heard.end.reason is FinishReason.LENGTH
    assert not store.handoffs()


def test_a_handoff_nobody_will_read_is_unlinked() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(50), name="x")
    world = World(store=store)
    request = world.request(prompt_of(50), await_handoff=True, name="x")
    world.submit(request)
    world.engine.hand_off(request.request_id, 1, handoff)
    world.engine.cancel(request.request_id, 1)
    world.run()
    assert not store.handoffs()


def test_a_handoff_that_was_left_but_never_announced_is_unlinked() -> None:
    store = MemoryStore()
    prefill(World(store=store), prompt_of(50), name="x")
    world = World(store=store)
    request = world.request(prompt_of(50), await_handoff=True, name="x")
    world.submit(request)
    assert store.handoffs()
    world.engine.cancel(request.request_id, 1)
    world.run()
    assert not store.handoffs()


def test_a_request_that_awaits_its_handoff_computes_nothing_before() -> None:
    world = World()
    request = world.request(prompt_of(20), await_handoff=True)
    heard = world.submit(request)
    world.run()
    assert (heard.tokens, world.engine.load().running, world.engine.waiting_counts()) == ([], 0, (1, 1))
    world.engine.hand_off(request.request_id, 1, Handoff(boundary_tokens=0, kind=None))
    world.engine.hand_off(request.request_id, 1, Handoff(boundary_tokens=0, kind=None))
    world.run()
    assert heard.ids == _greedy_ids()


def test_the_first_token_of_a_handoff_is_said_at_once_and_once() -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(50), name="x")
    world = World(store=store)
    request = world.request(prompt_of(50), await_handoff=True, name="x")
    heard = world.submit(request)
    world.engine.hand_off(request.request_id, 1, handoff)
    (event,) = world.engine.step()
    assert isinstance(event, TokensEvent)
    assert event.tokens == (handoff.first_token,)
    world.run()
    assert tuple(heard.tokens) == oracle(50)[1:]


def test_b7_usage_of_a_handoff_is_the_prefill_ranks() -> None:
    store = MemoryStore()
    prefill_world, decode_world = World(store=store), World(store=store)
    cold = prefill(prefill_world, prompt_of(100), name="x")
    assert decode(decode_world, prompt_of(100), cold, name="x").end.cached_tokens == 0
    warm = prefill(prefill_world, prompt_of(100), name="y")
    assert decode(decode_world, prompt_of(100), warm, name="y").end.cached_tokens == 64


def test_blocks_that_are_on_the_prefill_rank_but_no_longer_stored_are_stored_again() -> None:
    store = MemoryStore()
    world = World(store=store)
    prefill(world, prompt_of(100))
    lost = list(store.blocks)[2]
    del store.blocks[lost]
    handoff = prefill(world, prompt_of(100))
    assert handoff.stored
    assert handoff.cached_tokens == 64
    assert lost in store.blocks


def test_blocks_that_are_on_the_prefill_rank_and_stored_are_not_sent_again() -> None:
    store = MemoryStore()
    world = World(store=store)
    prefill(world, prompt_of(100))
    store.calls.clear()
    assert prefill(world, prompt_of(100)).cached_tokens == 64
    sent = sum(int(call.split()[1]) for call in store.calls if call.startswith("put "))
    assert sent == 6 - 4, "of six blocks four were restored"


@pytest.mark.parametrize("role", ModelRole)
@pytest.mark.parametrize("fidelity", Fidelity)
@pytest.mark.parametrize("fault", ["snapshot lost", "snapshot malformed", "block lost", "everything lost"])
def test_what_a_handoff_lost_is_computed_and_the_request_ends_well(
    fault: str, fidelity: Fidelity, role: ModelRole
) -> None:
    store = MemoryStore()
    handoff = prefill(World(store=store, role=role), prompt_of(64), name="x", fidelity=fidelity)
    if fault == "snapshot malformed":
        store.changed = lambda value: replace(value, parts={**value.parts, PartKind.WINDOW_ROWS: b"short"})
    else:
        lost_blocks = {"snapshot lost": [], "block lost": [1], "everything lost": [0, 1]}[fault]
        hashes = list(store.blocks)
        for depth in lost_blocks:
            del store.blocks[hashes[depth]]
        if fault != "block lost":
            store.snapshots.clear()
    world = World(store=store)
    heard = decode(world, prompt_of(64), handoff, name="x", fidelity=fidelity)
    assert len(heard.tokens) == GREEDY.max_tokens
    assert heard.end.reason is FinishReason.LENGTH
    if fidelity is Fidelity.EXACT:
        assert tuple(heard.tokens) == oracle(64)
    _nothing_held(world)


# Reuse


def test_a_warm_prompt_reports_r_and_what_was_replayed() -> None:
    for fidelity, replayed in ((Fidelity.EXACT, 0), (Fidelity.FAST, 16)):
        store = MemoryStore()
        World(store=store).generate(prompt_of(100), fidelity=fidelity)
        # R = 64 = 16 · ⌊(100 - 28) / 16⌋; turn snapshots lie at 64, 80 and 96.
        end = World(store=store).generate(prompt_of(100), fidelity=fidelity).end
        assert (end.cached_tokens, end.replayed_tokens) == (64, replayed)


def test_a_repeated_prompt_reports_its_hit_with_the_first_token() -> None:
    world = World()
    world.generate(prompt_of(60), ONE)
    world.submit(world.request(prompt_of(60), ONE))
    events = [event for _ in range(4) for event in world.step()]
    assert [event.cached_tokens for event in events if isinstance(event, TokensEvent)] == [32]


def test_generated_blocks_are_reused_too() -> None:
    store = MemoryStore()
    first = World(store=store).generate(prompt_of(44), replace(GREEDY, max_tokens=8))
    longer = (*prompt_of(44), *first.ids, *prompt_of(26, seed=9))
    assert World(store=store).generate(longer, ONE).end.cached_tokens == 48


def test_nothing_is_shared_under_another_salt_or_without_a_chain() -> None:
    store = MemoryStore()
    world = World(store=store)
    world.generate(prompt_of(60), salt=b"one tenant")
    assert world.generate(prompt_of(60), salt=b"another").end.cached_tokens == 0
    calls = len(store.calls)
    assert world.generate(prompt_of(60), shares=False).end.cached_tokens == 0
    assert len(store.calls) == calls


def test_reuse_can_be_switched_off() -> None:
    store = MemoryStore()
    options = replace(OPTIONS, prefix_reuse=False)
    world = World(store=store, options=options)
    world.generate(prompt_of(60))
    assert world.generate(prompt_of(60)).end.cached_tokens == 0
    assert World(store=store, options=options).generate(prompt_of(60)).end.cached_tokens == 0


def test_approximate_blocks_are_marked_and_an_exact_request_does_not_take_them() -> None:
    store = MemoryStore()
    World(store=store).generate(prompt_of(60), ONE)
    World(store=store).generate(prompt_of(100), ONE, fidelity=Fidelity.FAST)
    assert [exact for _, exact in store.blocks.values()] == [True] * 3 + [False] * 3
    world = World(store=store)
    assert world.generate(prompt_of(100), ONE).end.cached_tokens == 48
    assert [exact for _, exact in store.blocks.values()] == [True] * 6


def test_blocks_of_a_cold_fast_request_are_for_fast_requests() -> None:
    world = World()
    world.generate(prompt_of(100), ONE, fidelity=Fidelity.FAST)
    assert world.generate(prompt_of(100), ONE).end.cached_tokens == 0
    other = World()
    other.generate(prompt_of(100), ONE)
    assert other.generate(prompt_of(100), ONE, fidelity=Fidelity.FAST).end.cached_tokens > 0


def test_turn_snapshots_are_exact_and_short_lived() -> None:
    store = MemoryStore()
    World(store=store).generate(prompt_of(60), ONE)
    exact = set(store.turns())
    assert len(exact) == 3
    assert {store.lives[key] for key in exact} == {600.0}
    World(store=store).generate(prompt_of(100), ONE, fidelity=Fidelity.FAST)
    assert set(store.turns()) == exact


def test_no_turn_snapshot_is_taken_of_what_stands_on_an_approximate_block() -> None:
    store = MemoryStore()
    World(store=store).generate(prompt_of(45), ONE)
    store.snapshots.clear()
    store.blocks = {block_hash: (payload, False) for block_hash, (payload, _) in store.blocks.items()}
    # R = 16 = W: everything is replayed, but over a block that may not be exact.
    assert World(store=store).generate(prompt_of(45), ONE, fidelity=Fidelity.FAST).end.cached_tokens == 16
    assert not store.turns()


def test_an_exact_request_computes_beside_approximate_blocks_on_its_own_rank() -> None:
    world = World()
    world.generate(prompt_of(60), ONE)
    world.generate(prompt_of(92), ONE, fidelity=Fidelity.FAST)
    heard = world.generate(prompt_of(92))
    assert heard.end.cached_tokens == 48
    assert tuple(heard.tokens) == oracle(92)
    assert world.generate(prompt_of(92), ONE).end.cached_tokens == 64


def test_a_full_write_queue_drops_what_only_a_cache_would_miss() -> None:
    store = MemoryStore()
    world = World(store=store, options=replace(OPTIONS, publish_queue_bytes=1))
    heard = world.generate(prompt_of(60))
    assert heard.end.reason is FinishReason.LENGTH
    assert not store.blocks
    assert not store.snapshots


# Conservation


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_whatever_happens_every_request_ends_once_and_nothing_is_lost(seed: int) -> None:
    """Random arrivals of every kind, cancellations, hand-offs true and false, preemptions, a store with faults."""
    rng = Random(seed)
    store = MemoryStore(takes=lambda: rng.random() < 0.8, has=lambda: rng.random() < 0.8)
    world = World(store=store, options=replace(OPTIONS, slots=3, blocks=12, chunk_tokens=16, parked_bytes=20_000))
    asked, cancelled = [], set[bytes]()
    for _ in range(40):
        if rng.random() < 0.3:
            work = rng.choice(list(Work))
            request = world.request(
                prompt_of(rng.randrange(1, 90), seed=rng.randrange(3)),
                replace(GREEDY, max_tokens=rng.randrange(1, 24)),
                fidelity=rng.choice(list(Fidelity)),
                work=work,
                await_handoff=work is Work.GENERATE and rng.random() < 0.3,
                shares=rng.random() < 0.9,
            )
            world.submit(request)
            asked.append(request)
        if asked and rng.random() < 0.15:
            request = rng.choice(asked)
            if not world.heard[request.request_id].ends:
                cancelled.add(request.request_id)
            world.engine.cancel(request.request_id, 1)
        for request in asked:
            if request.await_handoff and rng.random() < 0.2:
                lie = Handoff(boundary_tokens=len(request.prompt_ids), kind=SnapshotKind.FULL)
                world.engine.hand_off(request.request_id, 1, rng.choice([lie, Handoff(0, None, stored=False)]))
        world.step()
    for request in asked:
        world.engine.hand_off(request.request_id, 1, Handoff(boundary_tokens=0, kind=None))
    world.run()
    for request in asked:
        heard = world.heard[request.request_id]
        assert len(heard.ends) == (request.request_id not in cancelled)
        assert all(end.reason is not FinishReason.ERROR for end in heard.ends)
    _nothing_held(world)
