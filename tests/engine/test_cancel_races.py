"""Cancellations that meet the end of what they cancel: nothing is said after them, and nothing is left of it."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, prompt_of
from tests.engine.memory_store import MemoryStore
from tests.engine.started_rank import AHEAD, StartedRank
from whalepod.core.clock import Deadline
from whalepod.core.errors import StaleAttemptError
from whalepod.engine.interface import FinishReason, HandoffEvent, StepEvent, Work
from whalepod.engine.rank import ATTEMPTS_REMEMBERED
from whalepod.model.tensor_layout import ModelRole


def _settled(world: StartedRank) -> None:
    """Everything that was posted has been handled, everything that was queued for the store is done."""
    world.end(world.submit(20))
    transfers = world.rank._engine.transfers
    while transfers is not None and transfers.has_writes:
        time.sleep(0.001)


def test_a_prefill_that_is_cancelled_as_its_handoff_is_reported_leaves_none_in_the_store() -> None:
    store = MemoryStore()
    world = StartedRank(store=store)
    engine = world.rank._engine
    step = engine.step

    def cancelled_meanwhile() -> list[StepEvent]:
        events = step()
        for event in events:
            if isinstance(event, HandoffEvent):
                world.rank.cancel(event.request_id, event.attempt)
        return events

    engine.step = cancelled_meanwhile  # type: ignore[method-assign]
    request = world.submit(40, work=Work.PREFILL)
    deadline = Deadline.after(5)
    while "put_snapshot" not in store.calls and not deadline.expired:
        time.sleep(0.001)
    _settled(world)
    world.stop()
    assert not world.events(request)
    assert store.blocks, "its blocks are good for anybody"
    assert store.handoffs() == []


def test_a_prefill_that_is_cancelled_between_its_end_and_the_next_step_leaves_none_in_the_store() -> None:
    store = MemoryStore()
    world = World(store=store)
    request = world.request(prompt_of(40), work=Work.PREFILL)
    heard = world.submit(request)
    while not store.handoffs():
        world.step()
    world.engine.cancel(request.request_id, 1)
    world.run()
    assert heard.handoff is None
    assert heard.ends == []
    assert store.handoffs() == []


@pytest.mark.parametrize("role", ModelRole)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a6_prefills_cancelled_at_random_moments_are_silent_and_leave_nothing(role: ModelRole, seed: int) -> None:
    rng, store = Random(seed), MemoryStore()
    world = StartedRank(store=store, role=role, options=replace(AHEAD, slots=3, chunk_tokens=16))
    kept: set[bytes] = set()
    requests = []
    for index in range(12):
        request = world.submit(rng.randrange(1, 70), work=Work.PREFILL, salt=bytes([index]))
        requests.append(request)
        time.sleep(rng.random() * 0.02)
        if rng.random() < 0.3:
            kept.add(request.request_id)
            continue
        world.rank.cancel(request.request_id, 1)
        said = len(world.events(request))
        world.rank.cancel(request.request_id, 1)
        world.rank.cancel(request.request_id, 2)
        assert len(world.events(request)) == said
    for request in requests:
        if request.request_id in kept:
            world.end(request)
    last = world.submit(20, work=Work.PREFILL)
    world.end(last)
    _drain_writes(world)
    world.stop()
    assert not world.failures
    announced = {request.request_id for request in [*requests, last] if world.ends(request)}
    assert kept <= announced
    left = {bytes.fromhex(key.decode().split("{")[1].split("-")[0]) for key in store.handoffs()}
    assert left <= announced, "a hand-off of which nobody was told is left"
    load = world.rank.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)


def _drain_writes(world: StartedRank) -> None:
    transfers = world.rank._engine.transfers
    assert transfers is not None
    while transfers.has_writes:
        time.sleep(0.001)


def test_a_newer_attempt_of_an_old_request_that_still_runs_takes_over_however_many_came_between() -> None:
    world = StartedRank(
        options=replace(OPTIONS, soft_slots=ATTEMPTS_REMEMBERED + 9, waiting_max=ATTEMPTS_REMEMBERED + 9)
    )
    old = world.submit(20, replace(GREEDY, max_tokens=900), name="old", await_handoff=True)
    for index in range(ATTEMPTS_REMEMBERED + 1):
        between = world.submit(1, name=f"b{index}", await_handoff=True)
        world.rank.cancel(between.request_id, 1)
    newer = world.submit(20, name="old", attempt=2)
    world.wait(lambda: len(world.ends(newer)) == 2 or world.failures)
    world.stop()
    assert not world.failures
    ends = {event.attempt: event for event in world.ends(old)}
    assert isinstance(ends[1].error, StaleAttemptError)
    assert ends[2].reason is FinishReason.LENGTH
