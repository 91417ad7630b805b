"""One step ahead of the device: the same tokens as in step with it, and nothing lost or given away too early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, World, oracle, prompt_of, tiny_model
from tests.engine.fake_runner import FakeRunner
from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId
from whalepod.engine.device import LaunchedRows
from whalepod.engine.interface import EngineRequest, Fidelity, FinishReason, SampledToken
from whalepod.engine.options import RankOptions
from whalepod.engine.runner import StepRunner
from whalepod.engine.sampling import DrawRow, Sampler, draw_rows
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.model.draft import Anchor, Chooser, Drafts

AHEAD = replace(OPTIONS, async_scheduling=True)


def fake(fails: frozenset[bytes] = frozenset()) -> FakeRunner:
    model = tiny_model()
    return FakeRunner(
        block_tokens=model.block_tokens,
        vocab_size=model.config.vocab_size,
        eos_id=model.config.eos_token_id,
        fails=fails,
    )


def _world(options: RankOptions, runner: FakeRunner) -> World:
    return World(options=options, instrument=lambda _: runner)


@dataclass(slots=True)
class Life:
    """What one random life of an engine said of each request, and what it was made of."""

    said: dict[RequestId, tuple[object, ...]] = field(default_factory=dict)
    cancelled: set[RequestId] = field(default_factory=set)
    events: int = 0
    preempted: int = 0
    accepted: int = 0
    """Drafts that stood."""


def _random_request(world: World, rng: Random, name: str, answer_tokens: int) -> EngineRequest:
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, answer_tokens),
        min_tokens=0,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=tuple(rng.sample(range(3, 500), rng.choice((0, 20)))),
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.7)),
    )
    prompt = prompt_of(rng.randrange(1, 80), seed=rng.randrange(4))
    fidelity, shares = rng.choice(list(Fidelity)), rng.random() < 0.8
    return world.request(prompt, sampling, fidelity=fidelity, shares=shares, name=name)


def live(
    seed: int,
    *,
    ahead: bool,
    requests: int = 12,
    speculation: SpeculationOptions | None = None,
    answer_tokens: int = 24,
) -> Life:
    """Arrivals, drops, stops, caps and preemptions, the same for both ways; blocks are counted after every step."""
    rng, runner, life = Random(seed), fake(), Life()
    options = replace(
        OPTIONS,
        async_scheduling=ahead,
        slots=rng.randint(1, 6),
        blocks=rng.randint(7, 16),
        context_tokens_max=104,
        chunk_tokens=rng.choice((8, 24, 64)),
        chunk_tokens_beside_decode=rng.choice((4, 16)),
        prefix_reuse=rng.random() < 0.7,
        parked_bytes=0,
        speculation=speculation,
    )
    world = _world(options, runner)
    arrivals = sorted(rng.randrange(30) for _ in range(requests))
    drops = {index: rng.randrange(1, 25) for index in range(requests) if rng.random() < 0.25}
    # In an order of their own, so that every request is the same however many steps there are.
    asked = [_random_request(world, rng, f"r{index}", answer_tokens) for index in range(requests)]
    steps = 0
    while steps < 60 or world.engine.runnable:
        for index, request in enumerate(asked):
            if arrivals[index] == steps:
                world.submit(request)
                life.events += 1
            if index in drops and arrivals[index] + drops[index] == steps:
                world.engine.cancel(request.request_id, 1)
                if not world.heard[request.request_id].ends:
                    life.cancelled.add(request.request_id)
                life.events += 1
        for event in world.step():
            assert event.request_id not in life.cancelled, "a dropped request was heard of"
            life.events += 1
        steps += 1
    load = world.engine.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)
    works = world.engine.take_works()
    empty = len(works) - runner.steps  # steps of rows behind an end that drafts have brought forward
    assert empty == 0 or (speculation is not None and empty > 0), "a step came back twice, or never"
    life.accepted = sum(each.accepted for work in works if work.speculation for each in work.speculation.requests)
    world.engine.close()
    life.preempted = world.engine.preempted
    for request_id, heard in world.heard.items():
        end = (heard.end.reason, heard.end.matched_stop_id) if request_id not in life.cancelled else None
        life.said[request_id] = (tuple(heard.tokens), end)
    return life


def compare_lives(one: Life, other: Life, label: str) -> None:
    """The same was said; of what was dropped, perhaps more."""
    dropped = one.cancelled | other.cancelled
    for request_id, said in other.said.items():
        if request_id not in dropped:
            assert one.said[request_id] == said, f"{label}: {request_id!r} differs"
        else:
            both = [life.said[request_id][0] for life in (one, other)]
            shorter, longer = sorted(both, key=len)  # type: ignore[arg-type]
            assert longer[: len(shorter)] == shorter, f"{label}: {request_id!r} differs"  # type: ignore[index,arg-type]


def _same(seed: int) -> tuple[Life, Life]:
    """One life both ways."""
    ahead, in_step = live(seed, ahead=True), live(seed, ahead=False)
    compare_lives(ahead, in_step, f"seed {seed}")
    return ahead, in_step


def _many(seeds: range) -> None:
    lives = [life for seed in seeds for life in _same(seed)]
    assert sum(life.preempted for life in lives) > 0
    assert sum(len(life.cancelled) for life in lives) > 0
    reasons = {said[1][0] for life in lives for said in life.said.values() if said[1] is not None}  # type: ignore[index]
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_step_ahead_says_the_same_in_random_lives() -> None:
    _many(range(30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_step_ahead_says_the_same_in_a_thousand_random_lives() -> None:
    _many(range(1000))


def _simulate(events: int) -> None:
    seed, done = 10_000, 0
    while done < events:
        try:
            done += live(seed, ahead=True, requests=40).events
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1


def test_thousands_of_events_lose_no_block_and_no_step() -> None:
    _simulate(5_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_events_lose_no_block_and_no_step() -> None:
    _simulate(100_000)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_cap_that_is_known_wastes_no_row(max_tokens: int) -> None:
    runner = fake()
    _world(AHEAD, runner).generate(prompt_of(20), replace(GREEDY, max_tokens=max_tokens))
    assert runner.decode_rows == max_tokens - 1


def test_a_stop_wastes_one_row() -> None:
    in_step, ahead = fake(), fake()
    ids = _world(OPTIONS, in_step).generate(prompt_of(20), replace(GREEDY, max_tokens=9)).ids
    heard = _world(AHEAD, ahead).generate(prompt_of(20), replace(GREEDY, max_tokens=9, stop_token_ids=(ids[3],)))
    assert heard.ids == ids[: ids.index(ids[3]) + 1]
    assert ahead.decode_rows == len(heard.ids)


def test_what_a_dropped_request_holds_stays_its_own_until_its_rows_are_done() -> None:
    world = _world(AHEAD, fake())
    request = world.request(prompt_of(40))
    world.submit(request)
    world.step()
    free = world.engine.load().blocks_free
    world.engine.cancel(request.request_id, 1)
    assert world.engine.load().blocks_free == free
    world.engine.check()
    world.run()
    load = world.engine.load()
    assert (load.running, load.blocks_free) == (0, load.blocks_total)
    assert not world.heard[request.request_id].ends


def test_a_failing_forward_ends_its_request_and_no_other() -> None:
    good_alone = _world(AHEAD, fake()).generate(prompt_of(20)).ids
    fails = RequestId(b"bad".ljust(16))
    world = _world(AHEAD, fake(frozenset({fails})))
    good, bad = world.submit(world.request(prompt_of(20))), world.submit(world.request(prompt_of(30), name="bad"))
    world.run()
    assert isinstance(bad.end.error, InternalError)
    assert good.ids == good_alone


def test_logits_that_are_no_numbers_end_their_request_although_its_next_row_is_on_its_way() -> None:
    runner = fake()
    runner._table[:] = float("nan")
    heard = _world(AHEAD, runner).generate(prompt_of(20))
    assert isinstance(heard.end.error, InternalError)
    assert not heard.tokens


def test_the_model_says_the_same_a_step_ahead() -> None:
    world = World(options=replace(AHEAD, chunk_tokens=24))
    cases = [(60, SEEDED), (17, GREEDY), (45, SEEDED)]
    heard = []
    for tokens, sampling in cases:
        heard.append(world.submit(world.request(prompt_of(tokens), sampling)))
        world.step()
    world.run()
    assert [tuple(each.tokens) for each in heard] == [oracle(tokens, sampling) for tokens, sampling in cases]


def _answer(options: RankOptions, instrument: Callable[[StepRunner], StepRunner] | None = None) -> list[list[int]]:
    """Two requests under grammars and one without, together."""
    world = World(options=options, instrument=instrument)
    digits = SamplingParams(
        temperature=1, seed=3, max_tokens=12, so_args={"schema_type": "regex", "schema": "[0-9]{3}-[a-f]{2,6}"}
    )
    heard = [
        world.submit(world.request(prompt_of(20 + index), sampling))
        for index, sampling in enumerate((digits, replace(SEEDED, max_tokens=9), replace(digits, seed=4)))
    ]
    world.run()
    return [each.ids for each in heard]


def test_grammars_are_followed_a_step_ahead() -> None:
    ahead, in_step = _answer(AHEAD, lambda _: fake()), _answer(OPTIONS, lambda _: fake())
    assert ahead == in_step
    assert all(ahead)


def test_every_token_that_was_drawn_counts_for_the_penalties_of_the_next() -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2, presence_penalty=2, max_tokens=40, ignore_eos=True)
    runner, prompt = fake(), prompt_of(20)
    ids = _world(AHEAD, runner).generate(prompt, sampling).ids
    for drawn in range(len(ids)):
        sampler = Sampler(sampling, key=0, eos_id=1, prompt_ids=prompt, output_ids=ids[:drawn])
        logits = runner.logits_after((*prompt, *ids[:drawn]))
        token = draw_rows(logits[None], [DrawRow(sampler, len(prompt) + drawn)])[0]
        assert isinstance(token, SampledToken)
        assert token.id == ids[drawn]


class _Gate:
    """A device that computes nothing until it is opened."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.opened = threading.Event()

    def run(self, rows: Sequence[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        assert self.opened.wait(30)
        return self._runner.run(rows)

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self._runner.draft(anchors, choose, tokens)


def test_the_host_goes_on_while_the_device_computes() -> None:
    gate = _Gate(fake())
    world = World(options=AHEAD, instrument=lambda _: gate)
    heard = world.submit(world.request(prompt_of(10)))
    assert world.step() == []
    assert world.engine.runnable, "it is not waited for"
    late = world.submit(world.request(prompt_of(30), timeout_s=0))
    gate.opened.set()
    world.step()
    assert len(heard.tokens) == 1, "the step that was launched first has come back"
    assert late.end.reason is FinishReason.ERROR
    world.run()
    assert len(heard.tokens) == GREEDY.max_tokens
