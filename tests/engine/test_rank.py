"""A rank on its threads: what it accepts, what it reports, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, RequestMaker, oracle, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from tests.engine.started_rank import StartedRank, tokens_of
from whalepod.core.errors import (
    CapacityError,
    ContextLengthError,
    DrainingError,
    InternalError,
    InvalidFieldError,
    StaleAttemptError,
    WorkerLostError,
)
from whalepod.engine.device import LaunchedRows
from whalepod.engine.interface import (
    Fidelity,
    FinishReason,
    Handoff,
    HandoffEvent,
    Work,
)
from whalepod.engine.rank import EngineRank
from whalepod.model.tensor_layout import ModelRole

ENDLESS = replace(GREEDY, max_tokens=900)


@contextmanager
def _started(**kinds: Any) -> Generator[StartedRank]:
    before = set(threading.enumerate())
    world = StartedRank(**kinds)
    try:
        yield world
    finally:
        world.stop()
        assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("engine-")]


def test_a_rank_generates_what_the_oracle_says() -> None:
    with _started() as world:
        request = world.submit()
        assert world.end(request).reason is FinishReason.LENGTH
        assert tokens_of(world.events(request)) == oracle(20)


def test_more_requests_than_slots_all_end() -> None:
    with _started(options=replace(OPTIONS, slots=2)) as world:
        requests = [world.submit() for _ in range(5)]
        assert {world.end(request).reason for request in requests} == {FinishReason.LENGTH}
        load = world.rank.load()
        assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)


def test_prefill_and_decode_over_a_store_with_real_workers() -> None:
    store = MemoryStore()
    with _started(store=store) as world:
        first = world.submit(50, work=Work.PREFILL, name="x", fidelity=Fidelity.EXACT)
        world.end(first)
        (handoff,) = [event.handoff for event in world.events(first) if isinstance(event, HandoffEvent)]
        assert handoff.stored
    with _started(store=store) as world:
        second = world.submit(50, await_handoff=True, name="x", fidelity=Fidelity.EXACT)
        world.rank.hand_off(second.request_id, 1, handoff)
        world.end(second)
        assert tokens_of(world.events(second)) == oracle(50)


def test_limits_are_known_before_the_start() -> None:
    limits = StartedRank(options=replace(OPTIONS, context_tokens_max=100), start=False).rank.limits
    assert (limits.context_tokens_max, limits.slots_total, limits.block_tokens) == (100, 4, 16)
    assert limits.namespace == tiny_model().namespace


def test_b5_b9_what_can_never_run_is_refused_at_once_and_names_the_field() -> None:
    with _started(options=replace(OPTIONS, context_tokens_max=30)) as world:
        for tokens in (30, 31, 39, 60):
            with pytest.raises(ContextLengthError):
                world.submit(tokens)
        with pytest.raises(InvalidFieldError, match="at least one token"):
            world.submit(0)
        with pytest.raises(InvalidFieldError, match="logit_bias"):
            world.submit(5, replace(GREEDY, logit_bias={512: 1.0}))
        with pytest.raises(InvalidFieldError, match="allowed_token_ids"):
            world.submit(5, replace(GREEDY, allowed_token_ids=(511, 512)))
        with pytest.raises(InvalidFieldError, match="bad_word_ids"):
            world.submit(5, replace(GREEDY, bad_word_ids=((3, 512),)))
        with pytest.raises(InternalError, match="bad words"):
            world.submit(5, replace(GREEDY, bad_words=("a",)))
        with pytest.raises(InvalidFieldError, match="stop_token_ids"):
            world.submit(5, replace(GREEDY, stop_token_ids=(512,)))
        assert world.end(world.submit(29)).reason is FinishReason.LENGTH


def test_a_request_whose_hashes_do_not_fit_its_prompt_is_refused() -> None:
    with _started() as world:
        request = world.requests.request(prompt_of(40))
        with pytest.raises(InternalError, match="1 block hashes for 40 tokens"):
            world.rank.submit(replace(request, block_hashes=request.block_hashes[:1]))


def test_a_full_queue_and_taken_soft_slots_are_refused() -> None:
    with _started(options=replace(OPTIONS, slots=1, waiting_max=3, soft_slots=2)) as world:
        running = world.submit(20, ENDLESS)
        world.wait(lambda: world.events(running))
        for _ in range(2):
            world.submit(20, await_handoff=True)
        with pytest.raises(CapacityError, match="soft slots"):
            world.submit(20, await_handoff=True)
        world.submit()
        with pytest.raises(CapacityError, match="queue is full"):
            world.submit()


def test_nothing_is_said_after_a_cancel_has_returned() -> None:
    with _started() as world:
        request = world.submit(20, ENDLESS)
        world.wait(lambda: world.events(request))
        world.rank.cancel(request.request_id, 1)
        said = len(world.events(request))
        other = world.submit()
        world.end(other)
        assert len(world.events(request)) == said
        world.rank.cancel(request.request_id, 1)
        world.rank.cancel(other.request_id, 1)
        assert world.rank.load().running == 0


def test_a_request_cancelled_before_the_loop_saw_it_is_never_heard_of() -> None:
    world = StartedRank(start=False)
    world.rank._running = True  # accepts, but its loop does not run yet
    request = world.submit()
    world.rank.cancel(request.request_id, 1)
    world.rank.start()
    world.end(world.submit())
    assert not world.events(request)
    world.rank.stop()


def test_a_newer_attempt_ends_the_older_and_an_older_one_is_refused() -> None:
    with _started() as world:
        first = world.submit(20, ENDLESS, name="x", attempt=2)
        world.wait(lambda: world.events(first))
        with pytest.raises(StaleAttemptError):
            world.submit(20, name="x", attempt=1)
        with pytest.raises(StaleAttemptError):
            world.submit(20, name="x", attempt=2)
        second = world.submit(20, name="x", attempt=3)
        world.wait(lambda: len(world.ends(second)) == 2)
        ends = {event.attempt: event for event in world.ends(second)}
        assert isinstance(ends[2].error, StaleAttemptError)
        assert ends[3].reason is FinishReason.LENGTH


def test_a_deadline_is_kept_while_nothing_else_happens() -> None:
    with _started() as world:
        request = world.submit(20, await_handoff=True, timeout_s=0.2)
        assert world.end(request).reason is FinishReason.ERROR


def test_stopping_gives_back_everything_that_was_accepted() -> None:
    world = StartedRank()
    running, waiting = world.submit(20, ENDLESS), world.submit(20, await_handoff=True)
    world.wait(lambda: world.events(running))
    world.rank.give_back()
    said = len(world.events(running))
    world.rank.stop()
    world.rank.stop()
    assert len(world.events(running)) == said, "a step that ran meanwhile is not heard of"
    for request in (running, waiting):
        assert isinstance(world.end(request).error, DrainingError)
    with pytest.raises(WorkerLostError):
        world.submit()
    assert not world.rank.alive
    assert not world.failures


def test_a_broken_invariant_ends_every_request_and_is_reported_once() -> None:
    with _started() as world:

        def breaking(rows: Sequence[LaunchedRows]) -> list[Any]:
            raise AssertionError("a block is owned twice")

        waiting = world.submit(20, await_handoff=True)
        world.rank._engine._runner.run = breaking
        running = world.submit()
        for request in (running, waiting):
            assert isinstance(world.end(request).error, WorkerLostError)
        world.wait(lambda: world.failures or not world.rank.alive)
        assert not world.rank.alive
        with pytest.raises(WorkerLostError):
            world.submit()
    assert [str(failure) for failure in world.failures] == ["a block is owned twice"]


def test_a_rank_without_upper_layers_refuses_to_generate() -> None:
    rank = EngineRank(tiny_model(ModelRole.ENCODER), OPTIONS, store=None, on_step=lambda _: None)
    rank.start()
    with pytest.raises(InternalError, match="cannot generate"):
        rank.submit(RequestMaker(tiny_model()).request(prompt_of(20)))
    rank.stop()


def test_a_handoff_for_nobody_does_nothing() -> None:
    with _started() as world:
        request = world.submit()
        world.rank.hand_off(request.request_id, 7, Handoff(boundary_tokens=0, kind=None))
        world.rank.hand_off(request.request_id, 1, Handoff(boundary_tokens=20, kind=None))
        assert world.end(request).reason is FinishReason.LENGTH
