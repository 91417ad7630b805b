"""Choices of one prompt: each has noise of its own, and the prompt is computed once for all that meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from tests.engine.engine_world import OPTIONS, SEEDED, Heard, World, oracle, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.engine.device import LaunchedRows
from whalepod.engine.interface import EngineRequest, Fidelity, SampledToken, Work
from whalepod.engine.runner import StepRunner
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.tensor_layout import ModelRole

TOKENS = 60
CHOICES = 4


class RowCounter:
    """Counts the rows of a network."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.rows = 0

    def run(self, rows: Sequence[LaunchedRows]) -> Sequence[Any]:
        self.rows += sum(len(row.segment.token_ids) for row in rows)
        return self._runner.run(rows)

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self._runner.draft(anchors, choose, tokens)


def branches(
    world: World, sampling: SamplingParams = SEEDED, tokens: int = TOKENS, **kinds: Any
) -> list[EngineRequest]:
    first = world.request(prompt_of(tokens), sampling, name="choice 0", **kinds)
    return [first] + [
        replace(
            first,
            request_id=world.request([1], name=f"choice {branch}").request_id,
            branch=branch,
            branch_of=first.request_id,
        )
        for branch in range(1, CHOICES)
    ]


def said(heard: Heard) -> tuple[SampledToken, ...]:
    return tuple(heard.tokens)


@cache
def alone(branch: int, sampling: SamplingParams = SEEDED, tokens: int = TOKENS) -> tuple[SampledToken, ...]:
    """What one choice says on a rank where nothing else ever ran."""
    world = World()
    request = replace(branches(world, sampling, tokens)[branch], branch_of=None)
    heard = world.submit(request)
    world.run()
    return said(heard)


def test_choices_with_one_seed_differ_and_choice_0_is_what_one_alone_says() -> None:
    answers = [alone(branch) for branch in range(CHOICES)]
    assert len({tuple(token.id for token in answer) for answer in answers}) == CHOICES
    assert answers[0] == oracle(TOKENS, SEEDED)


@pytest.mark.parametrize("parked_bytes", [1 << 30, 0])
def test_choices_that_meet_compute_their_prompt_once_and_say_what_they_say_alone(parked_bytes: int) -> None:
    counters: list[RowCounter] = []

    def counted(runner: StepRunner) -> StepRunner:
        counters.append(RowCounter(runner))
        return counters[-1]

    world = World(options=replace(OPTIONS, parked_bytes=parked_bytes), instrument=counted)
    heard = [world.submit(request) for request in branches(world)]
    world.run()
    assert [said(each) for each in heard] == [alone(branch) for branch in range(CHOICES)]
    assert {each.end.cached_tokens for each in heard} == {0}, "what a choice takes over from another is no hit"
    if parked_bytes:
        decode_rows = CHOICES * (SEEDED.max_tokens or 0)
        assert counters[0].rows == TOKENS - 1 + decode_rows, "the prompt once, and a last row for each choice"


def test_choices_share_the_blocks_of_their_prompt() -> None:
    world = World()
    requests = branches(world)
    for request in requests:
        world.submit(request)
    while len(world.engine._scheduler.holding) < CHOICES:
        world.step()
    tables = [sequence.blocks[: TOKENS // 16] for sequence in world.engine._scheduler.holding]
    assert tables == [tables[0]] * CHOICES
    world.run()


def test_choices_of_a_rank_with_little_memory_say_the_same() -> None:
    """One slot, then too few blocks for all: choices wait, and are preempted."""
    sampling = replace(SEEDED, max_tokens=7)
    for options in (replace(OPTIONS, slots=1), replace(OPTIONS, blocks=9, chunk_tokens=24)):
        world = World(options=options)
        heard = [world.submit(request) for request in branches(world, sampling, shares=options.slots == 1)]
        world.run()
        assert [said(each) for each in heard] == [alone(branch, sampling) for branch in range(CHOICES)]
    assert world.engine.preempted > 0


def _cancel_first(world: World, requests: list[EngineRequest]) -> None:
    world.engine.cancel(requests[0].request_id, 1)


def _cancel_two(world: World, requests: list[EngineRequest]) -> None:
    world.engine.cancel(requests[0].request_id, 1)
    world.engine.cancel(requests[2].request_id, 1)


@pytest.mark.parametrize("drop", [_cancel_first, _cancel_two])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_choice_that_is_dropped_takes_no_other_with_it(
    steps: int, drop: Callable[[World, list[EngineRequest]], None]
) -> None:
    world = World(options=replace(OPTIONS, chunk_tokens=24))
    requests = branches(world)
    heard = [world.submit(request) for request in requests]
    for _ in range(steps):
        world.step()
    drop(world, requests)
    world.run()
    for branch in (1, 3):
        assert said(heard[branch]) == alone(branch)


def test_a_choice_whose_prompt_differs_or_comes_late_computes_it() -> None:
    world = World()
    first, second, third, _ = branches(world)
    heard = world.submit(first)
    other = replace(second, prompt_ids=prompt_of(TOKENS, seed=1), chain_root=None, block_hashes=())
    strange = world.submit(other)
    assert other.request_id in {sequence.request.request_id for sequence in world.engine._scheduler.waiting}
    world.step()
    late = world.submit(third)
    world.run()
    assert said(heard) == alone(0)
    assert said(late) == alone(2)
    assert len(strange.tokens) == SEEDED.max_tokens


def test_one_row_has_nothing_to_share() -> None:
    world = World()
    heard = [world.submit(request) for request in branches(world, tokens=1)]
    assert all(sequence.admissible for sequence in world.engine._scheduler.waiting)
    world.run()
    assert [said(each) for each in heard] == [alone(branch, tokens=1) for branch in range(CHOICES)]


@pytest.mark.parametrize(("role", "fidelity"), [(ModelRole.FULL, Fidelity.EXACT), (ModelRole.ENCODER, Fidelity.EXACT)])
def test_choices_are_handed_over_one_by_one(role: ModelRole, fidelity: Fidelity) -> None:
    store = MemoryStore()
    before, after = World(store=store, role=role), World(store=store)
    requests = branches(before, work=Work.PREFILL, fidelity=fidelity)
    prefilled = [before.submit(request) for request in requests]
    before.run()
    decoded, boundary = [], 0
    for request, prompt in zip(requests, prefilled, strict=True):
        assert prompt.handoff is not None
        boundary = prompt.handoff.boundary_tokens
        assert prompt.handoff.stored
        work = replace(request, work=Work.GENERATE, await_handoff=True)
        decoded.append(after.submit(work))
        after.engine.hand_off(work.request_id, 1, prompt.handoff)
    while len(after.engine._scheduler.holding) < CHOICES:
        after.step()
    shared = {sequence.blocks[: boundary // 16] for sequence in after.engine._scheduler.holding}
    assert len(shared) == 1, "one of them has restored the blocks of all"
    after.run()
    assert [said(heard) for heard in decoded] == [alone(branch) for branch in range(CHOICES)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_choice_that_waits_for_anothers_blocks_gets_them_itself_if_that_one_is_dropped(steps: int) -> None:
    store = MemoryStore()
    before, after = World(store=store), World(store=store)
    requests = branches(before, work=Work.PREFILL)
    prefilled = [before.submit(request) for request in requests]
    before.run()
    decoded = []
    for request, prompt in zip(requests, prefilled, strict=True):
        assert prompt.handoff is not None
        decoded.append(after.submit(replace(request, work=Work.GENERATE, await_handoff=True)))
        after.engine.hand_off(request.request_id, 1, prompt.handoff)
    for _ in range(steps):
        after.step()
    after.engine.cancel(requests[0].request_id, 1)
    after.run()
    assert [said(heard) for heard in decoded[1:]] == [alone(branch) for branch in range(1, CHOICES)]


@pytest.mark.slow
def test_random_lives_of_choices_change_nothing() -> None:
    wanted = {tokens: [alone(branch, tokens=tokens) for branch in range(CHOICES)] for tokens in (17, 45, 60)}
    for seed in range(8):
        rng = Random(seed)
        options = replace(
            OPTIONS,
            slots=rng.randint(1, 5),
            blocks=rng.randint(8, 20),
            chunk_tokens=rng.choice((8, 24, 64)),
            parked_bytes=rng.choice((0, 1 << 30)),
            async_scheduling=rng.random() < 0.5,
        )
        world, tokens = World(options=options), rng.choice((17, 45, 60))
        requests, heard = branches(world, tokens=tokens), list[Heard]()
        dropped = rng.randrange(2 * CHOICES)
        for request in requests:
            heard.append(world.submit(request))
            for _ in range(rng.randrange(2)):
                world.step()
        for _ in range(rng.randrange(6)):
            world.step()
        if dropped < CHOICES:
            world.engine.cancel(requests[dropped].request_id, 1)
        world.run()
        world.engine.close()
        for branch, each in enumerate(heard):
            assert branch == dropped or said(each) == wanted[tokens][branch], f"seed {seed}, choice {branch}"
