"""Drafts change no token: with and without, many or few verified, alone or among others, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import replace
from random import Random

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, World, decode, oracle, prefill, prompt_of, tiny_model
from tests.engine.fake_runner import FakeRunner
from tests.engine.memory_store import MemoryStore
from tests.engine.test_pipeline import compare_lives, fake, live
from whalepod.core.lifecycle import Phase
from whalepod.engine.interface import FinishReason, SnapshotKind
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.sequence import Sequence
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.options import Acceptance, SpeculationOptions, Verification
from whalepod.engine.speculation.statistics import add_up
from whalepod.engine.state_image import StateImage
from whalepod.model.batch import Segment
from whalepod.model.draft import Drafts
from whalepod.model.tensor_layout import ModelRole

COUPLED = SpeculationOptions(draft_tokens=4, acceptance=Acceptance.COUPLED)
COST = CostTable(bias=5.0, requests=[(1, 0.0)], rows=[(1, 0.0), (8, 1.0), (9, 3.0), (60, 30.0)], draft=[(1, 0.5)])


QUICK = (0, 7, 13, 24)


def ways() -> Iterator[tuple[str, SpeculationOptions]]:
    """Numbers of drafts, and ways to choose how many of them are verified."""
    for drafts in range(1, 5):
        yield f"{drafts} drafts", replace(COUPLED, draft_tokens=drafts)
    for verification in (Verification.SCHEDULED, Verification.EARLY_STOP):
        yield verification.value, replace(COUPLED, verification=verification, cost=COST, gain_min=0.0)


@pytest.mark.parametrize(("label", "speculation"), [pytest.param(*way, id=way[0]) for way in ways()])
def test_random_lives_say_the_same_with_drafts(label: str, speculation: SpeculationOptions) -> None:
    _compare(label, speculation, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("label", "speculation"), [pytest.param(*way, id=way[0]) for way in ways()])
def test_many_random_lives_say_the_same_with_drafts(label: str, speculation: SpeculationOptions) -> None:
    _compare(label, speculation, range(100, 150))


def _compare(label: str, speculation: SpeculationOptions, seeds: Ordered[int]) -> None:
    accepted = preempted = 0
    for seed in seeds:
        without = live(seed, ahead=False, answer_tokens=80)
        for ahead in (False, True):
            life = live(seed, ahead=ahead, speculation=speculation, answer_tokens=80)
            compare_lives(life, without, f"{label}, seed {seed}, ahead {ahead}")
            accepted += life.accepted
            preempted += life.preempted
    assert accepted > 100
    assert preempted > 0


MODEL_CASES = [
    (60, replace(GREEDY, max_tokens=20)),
    (17, replace(SEEDED, max_tokens=20)),
    (5, replace(SEEDED, max_tokens=12)),
]
"""Prompt tokens, and how is sampled; log-probabilities are told."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_the_model_says_the_same_with_drafts(drafts: int, ahead: bool) -> None:
    speculation = SpeculationOptions(draft_tokens=drafts)
    world = World(options=replace(OPTIONS, speculation=speculation, async_scheduling=ahead))
    heard = [world.submit(world.request(prompt_of(tokens), sampling)) for tokens, sampling in MODEL_CASES]
    world.run()
    assert [tuple(each.tokens) for each in heard] == [oracle(tokens, sampling) for tokens, sampling in MODEL_CASES]
    works = [work.speculation for work in world.engine.take_works() if work.speculation is not None]
    counts = add_up(5, works)
    assert counts.verified_length > 0.8 * drafts
    assert counts.accepted.sum() > 0
    assert counts.emitted == counts.request_steps + counts.accepted.sum()


@pytest.mark.parametrize("role", list(ModelRole))
def test_a_hand_off_goes_on_with_drafts(role: ModelRole) -> None:
    store = MemoryStore()
    there = World(store=store, role=role)
    options = replace(OPTIONS, speculation=SpeculationOptions())
    here, alone = World(store=store, options=options), World(options=options)

    def drafts(world: World) -> list[tuple[int, int]]:
        works = [work.speculation for work in world.engine.take_works() if work.speculation is not None]
        return [(each.verified, each.accepted) for work in works for each in work.requests]

    for tokens, sampling in MODEL_CASES:
        handoff = prefill(there, prompt_of(tokens), sampling, name=f"of {tokens}")
        heard = decode(here, prompt_of(tokens), handoff, sampling, name=f"of {tokens}")
        assert tuple(heard.tokens) == oracle(tokens, sampling)
        # The draft windows have come, too: what is guessed is what a rank that has computed the prompt guesses.
        alone.generate(prompt_of(tokens), sampling)
        assert drafts(here) == drafts(alone)


GRAMMARS = (("regex", "[0-9]{3}-[a-f]{2,6}"), ("regex", "(?s:.*)"), ("json_schema", '{"type": "array", "maxItems": 3}'))


def test_grammars_are_followed_with_drafts() -> None:
    def answers(speculation: SpeculationOptions | None, *, ahead: bool) -> list[list[int]]:
        options = replace(OPTIONS, async_scheduling=ahead, speculation=speculation)
        world = World(options=options, instrument=lambda _: fake())
        sampled = SamplingParams(temperature=1, seed=3, max_tokens=16, logprobs=1)
        greedy = replace(sampled, temperature=0)
        heard = [
            world.submit(
                world.request(prompt_of(20 + index), replace(base, so_args={"schema_type": kind, "schema": text}))
            )
            for index, base in enumerate((sampled, greedy))
            for kind, text in GRAMMARS
        ]
        heard.append(world.submit(world.request(prompt_of(9), replace(SEEDED, max_tokens=9))))
        world.run()
        works = [work.speculation for work in world.engine.take_works() if work.speculation is not None]
        accepted.append(int(add_up(5, works).accepted.sum()))
        return [each.ids for each in heard]

    accepted: list[int] = []
    without = answers(None, ahead=False)
    assert all(without)
    for drafts in (1, 5):
        for ahead in (False, True):
            assert answers(SpeculationOptions(draft_tokens=drafts), ahead=ahead) == without
    assert min(accepted[1:]) > 5


def test_a_request_never_says_more_than_it_was_asked_for() -> None:
    world = World(options=replace(OPTIONS, speculation=SpeculationOptions()), instrument=lambda _: fake())
    for count in range(1, 10):
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        heard = world.generate(prompt_of(20, seed=count), sampling)
        assert len(heard.tokens) == count
        assert heard.end.reason is FinishReason.LENGTH
    assert (
        max(
            max(each.verified for each in work.speculation.requests)
            for work in world.engine.take_works()
            if work.speculation
        )
        == 5
    )


def test_a_drafter_that_fails_costs_drafts_and_no_token() -> None:
    class Broken(FakeRunner):
        def draft(self, anchors: object, choose: object, tokens: int) -> Drafts:
            raise RuntimeError("a kernel failed")

    model = tiny_model()
    broken = Broken(
        block_tokens=model.block_tokens, vocab_size=model.config.vocab_size, eos_id=model.config.eos_token_id
    )
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    options = replace(OPTIONS, speculation=SpeculationOptions())
    with_broken = World(options=options, instrument=lambda _: broken).generate(prompt_of(20), sampling)
    without = World(instrument=lambda _: fake()).generate(prompt_of(20), sampling)
    assert with_broken.ids == without.ids


def _forced_lives(steps: int, *, ahead: bool) -> None:
    """Drafts stand by coin; after every few steps all that can be reached is what one row after another leaves."""
    speculation = SpeculationOptions(simulated_acceptance=0.6)
    options = replace(
        OPTIONS, speculation=speculation, async_scheduling=ahead, slots=3, blocks=11, context_tokens_max=160
    )
    world = World(options=options)
    made = compared = 0
    for step in range(steps):
        if len(world.engine._sequences) < 4:
            made += 1
            sampling = SamplingParams(temperature=1, seed=made, max_tokens=25 + 7 * (made % 5), ignore_eos=True)
            world.submit(world.request(prompt_of(3 + 13 * (made % 5), seed=made), sampling, shares=False))
        world.step()
        if step % 5 == 4:
            world.engine._settle(ahead=0)
            compared += sum(_is_as_fresh(world, sequence) for sequence in world.engine._scheduler.holding)
    assert compared > steps / 10
    assert world.engine.preempted > 0


def _is_as_fresh(world: World, sequence: Sequence) -> bool:
    """Compare its blocks and windows with those of a run without drafts. False: it does not decode yet."""
    if sequence.phase is not Phase.DECODING:
        return False
    model, computed = tiny_model(), sequence.computed
    caches = model.allocate(blocks=len(sequence.blocks), slots=1)
    for start, end in ((0, sequence.prompt_tokens), (sequence.prompt_tokens, computed)):
        if end > start:
            ids, history = sequence.tokens[start:end], sequence.tokens[max(0, start - 3) : start]
            table = tuple(range(len(sequence.blocks)))
            segment = Segment(0, table, start, ids, history, floor=sequence.floor, logits_start=None)
            model.network.forward([segment], caches)
    fresh, used = StateImage(caches, model.config), world.engine._publisher._image
    for depth in range(computed // model.block_tokens):
        assert bytes(used.export_block(sequence.blocks[depth]).wait()) == bytes(fresh.export_block(depth).wait())
    assert sequence.slot is not None
    mine, right = (
        image.export_snapshot(
            SnapshotKind.FULL, slot=slot, blocks=blocks, boundary=computed, prompt_tokens=sequence.prompt_tokens
        ).wait()
        for image, slot, blocks in (
            (used, sequence.slot.index, sequence.blocks),
            (fresh, 0, tuple(range(len(sequence.blocks)))),
        )
    )
    assert {part: bytes(data) for part, data in mine.parts.items()} == {
        part: bytes(data) for part, data in right.parts.items()
    }
    return True


@pytest.mark.parametrize("ahead", [False, True])
def test_whatever_stands_the_state_is_that_of_one_row_after_another(ahead: bool) -> None:
    _forced_lives(40, ahead=ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_the_state_stays_that_of_one_row_after_another_for_200_steps(ahead: bool) -> None:
    _forced_lives(250, ahead=ahead)


BATCH = 32


def _coupled_answers(speculation: SpeculationOptions | None, *, cut: int | None, beside: int) -> list[list[int]]:
    """Of the same first requests, with others beside them; after `cut` tokens they go on with another engine."""
    options = replace(OPTIONS, slots=BATCH, blocks=6 * BATCH, speculation=speculation)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=18, ignore_eos=True, presence_penalty=0.4)
    said: list[list[int]] = [[] for _ in range(FOLLOWED)]
    for end in (cut or sampling.max_tokens, sampling.max_tokens):
        world = World(options=options, instrument=lambda _: fake())
        heard = [
            world.submit(
                world.request(
                    prompt_of(20 + index, seed=index),
                    replace(sampling, seed=index, max_tokens=end),
                    name=f"followed {index}",
                    resumed=said[index] if index < FOLLOWED else (),
                )
            )
            for index in range(FOLLOWED + beside)
            if index >= FOLLOWED or len(said[index]) < (end or 0)
        ]
        world.run()
        for ids, each in zip(said, heard, strict=False):
            ids += each.ids
    return said


FOLLOWED = 4


BATCH_COST = replace(COST, rows=[*COST.rows[:-1], (6 * BATCH, 60.0)])
COUPLED_WAYS = [
    pytest.param(0, Verification.FIXED, marks=pytest.mark.slow),
    (3, Verification.FIXED),
    pytest.param(3, Verification.SCHEDULED, marks=pytest.mark.slow),
    pytest.param(5, Verification.FIXED, marks=pytest.mark.slow),
    (5, Verification.SCHEDULED),
]


@pytest.mark.parametrize(("drafts", "verification"), COUPLED_WAYS)
def test_coupled_answers_are_the_same_for_any_drafts_beside_anybody_and_on_another_rank(
    drafts: int, verification: Verification
) -> None:
    right = _coupled_answers(None, cut=None, beside=0)
    assert {len(ids) for ids in right} == {18}
    speculation = None
    if drafts:
        speculation = replace(COUPLED, draft_tokens=drafts, verification=verification, cost=BATCH_COST, gain_min=0.0)
    for cut, beside in ((None, 0), (7, 0), (11, BATCH - FOLLOWED)):
        assert _coupled_answers(speculation, cut=cut, beside=beside) == right, (cut, beside)


def _greedy_answers(speculation: SpeculationOptions | None) -> list[list[int]]:
    """Of 500 prompts, with blocks for half of what fits the slots, so that requests are preempted."""
    rng = Random(3)
    options = replace(OPTIONS, slots=16, blocks=30, context_tokens_max=80, chunk_tokens=128, speculation=speculation)
    world = World(options=options)
    heard = [
        world.submit(
            world.request(
                prompt_of(rng.randint(1, 60), seed=rng.randrange(50)),
                SamplingParams(temperature=0, max_tokens=rng.randint(2, 12), ignore_eos=True),
            )
        )
        for _ in range(500)
    ]
    world.run()
    assert world.engine.preempted > 0
    return [each.ids for each in heard]


@pytest.fixture(scope="module")
def greedy_answers() -> list[list[int]]:
    return _greedy_answers(None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafts", range(1, 6))
def test_500_greedy_answers_are_the_same_with_drafts(drafts: int, greedy_answers: list[list[int]]) -> None:
    assert _greedy_answers(SpeculationOptions(draft_tokens=drafts)) == greedy_answers
