"""Requests that go on where another rank has left off: in `exact`, nobody can tell that anything happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.engine.engine_world import OPTIONS, World, decode, prefill, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.core.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    ServingError,
    StaleAttemptError,
    WorkerLostError,
)
from whalepod.core.ids import RequestId
from whalepod.engine import publishing
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import Fidelity, FinishReason, SampledToken, Work
from whalepod.engine.options import RankOptions
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.model.tensor_layout import ModelRole

TOKENS = 75
"""Of the prompt: four blocks of 16 and a part of one, and far above the kept rows."""
OUTPUT = 12
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(seed=11, max_tokens=OUTPUT, ignore_eos=True, logprobs=2),
    "scored": SamplingParams(seed=11, max_tokens=OUTPUT, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "unseeded": SamplingParams(max_tokens=OUTPUT, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0,
        max_tokens=OUTPUT,
        min_tokens=OUTPUT - 2,
        logprobs=1,
        presence_penalty=1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
    ),
    "masks": SamplingParams(
        temperature=0,
        max_tokens=OUTPUT,
        allowed_token_ids=tuple(range(3, 9)),
        bad_word_ids=((5,), *((first, 4, last) for first in range(3, 9) for last in range(3, 9))),
    ),
    "grammar": SamplingParams(seed=3, max_tokens=OUTPUT, grammar=GrammarSpec(GrammarKind.REGEX, r"[a-f]{3}(-\d+)+")),
}


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """A rank that dies, and one that takes over, which share a store; and one without."""
    store = MemoryStore()
    return {"first": World(store=store), "second": World(store=store), "storeless": World()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_request_goes_on_as_if_nothing_had_happened(worlds: dict[str, World], kind: str) -> None:
    whole = worlds["first"].generate(prompt_of(TOKENS), KINDS[kind], name=kind)
    last = len(whole.tokens) - 1
    for cut, second in (1, "storeless"), (6, "second"), (last, "second"):
        worlds[second].heard.clear()
        rest = worlds[second].generate(prompt_of(TOKENS), KINDS[kind], name=kind, attempt=2, resumed=whole.ids[:cut])
        assert rest.tokens == whole.tokens[cut:], cut
        assert rest.prompt == [], "the prompt's scores were told before"
        assert rest.end.reason == whole.end.reason


@pytest.mark.parametrize("role", [ModelRole.FULL, ModelRole.ENCODER])
def test_an_exact_request_goes_on_over_a_prefill_rank_too(role: ModelRole) -> None:
    store, kind, sampling = MemoryStore(), "grammar", KINDS["grammar"]
    whole = World().generate(prompt_of(TOKENS), sampling, name=kind)
    resumed = whole.ids[: len(whole.ids) // 2]
    handoff = prefill(World(store=store, role=role), prompt_of(TOKENS), sampling, name=kind, resumed=resumed)
    assert handoff.boundary_tokens > 0
    rest = decode(World(store=store), prompt_of(TOKENS), handoff, sampling, name=kind, resumed=resumed)
    assert rest.tokens == whole.tokens[len(resumed) :]


def test_a_fast_request_takes_its_output_for_prompt_and_hits_the_blocks_it_has_generated() -> None:
    store, sampling = MemoryStore(), SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    whole = World(store=store).generate(prompt_of(TOKENS), sampling, fidelity=Fidelity.FAST)
    world = World(store=store)
    rest = world.generate(prompt_of(TOKENS), sampling, fidelity=Fidelity.FAST, resumed=whole.ids[:60])
    assert rest.end.cached_tokens == 96  # R of 135 tokens: B · ⌊(135 - 28) / 16⌋
    assert len(rest.tokens) == 10
    assert rest.end.reason is FinishReason.LENGTH


def test_output_so_far_counts_against_the_context() -> None:
    world = World()
    room = world.engine.memory.context_tokens_max - TOKENS
    with pytest.raises(ContextLengthError):
        world.submit(world.request(prompt_of(TOKENS), resumed=[5] * room))


LONG = SamplingParams(seed=5, max_tokens=62, ignore_eos=True, logprobs=1)
CRASHES = replace(OPTIONS, crash_tokens=16)
"""So borders are at 96, 112 and 128 tokens."""
AHEAD = replace(CRASHES, async_scheduling=True, speculation=SpeculationOptions())
SAID = 60
NAME = RequestId(b"name".ljust(16))


@cache
def whole() -> tuple[SampledToken, ...]:
    return tuple(World().generate(prompt_of(TOKENS), LONG, name="name").tokens)


@cache
def _killed(options: RankOptions) -> tuple[MemoryStore, list[int]]:
    store = MemoryStore()
    world = World(store=store, options=options)
    heard = world.submit(world.request(prompt_of(TOKENS), LONG, name="name"))
    while len(heard.tokens) < SAID:
        world.step()
    return store, heard.ids


def killed(options: RankOptions = CRASHES) -> tuple[MemoryStore, list[int]]:
    """What a rank has stored, and said, when it dies in the middle of the request `name`."""
    store, said = _killed(options)
    return MemoryStore(blocks=dict(store.blocks), snapshots=dict(store.snapshots)), said[:SAID]


@pytest.mark.parametrize("options", [CRASHES, AHEAD], ids=["token by token", "ahead, with drafts"])
def test_an_exact_request_goes_on_from_what_its_rank_left_last_before_it_died(options: RankOptions) -> None:
    _, said = killed(options)
    assert said == [token.id for token in whole()[:SAID]]
    for cut, boundary in (SAID, 128), (53, 112):
        store, _ = killed(options)
        assert len(store.crashes()) == 2
        world = World(store=store, options=options)
        rest = world.generate(prompt_of(TOKENS), LONG, name="name", attempt=2, resumed=said[:cut])
        assert tuple(rest.tokens) == whole()[cut:]
        assert rest.end.cached_tokens == boundary, "only what follows is computed"


def test_a_request_that_ends_leaves_nothing_to_go_on_from() -> None:
    store, said = killed()
    World(store=store, options=CRASHES).generate(prompt_of(TOKENS), LONG, name="name", attempt=2, resumed=said)
    assert store.crashes() == []


def _running(store: MemoryStore, *, tokens: int, attempt: int = 1, resumed: Sequence[int] = ()) -> World:
    world = World(store=store, options=CRASHES)
    heard = world.submit(world.request(prompt_of(TOKENS), LONG, name="name", attempt=attempt, resumed=resumed))
    while len(heard.tokens) < tokens:
        world.step()
    return world


def test_a_request_that_is_cancelled_leaves_nothing_unless_it_goes_on_elsewhere() -> None:
    store = MemoryStore()
    world = _running(store, tokens=40)
    assert store.crashes()
    world.engine.cancel(NAME, 1, goes_on=True)
    world.run()
    assert len(store.crashes()) == 2
    world = _running(store, tokens=5, attempt=2, resumed=[token.id for token in whole()[:40]])
    world.engine.cancel(NAME, 2)
    world.run()
    assert store.crashes() == []


def test_what_was_left_for_another_rank_is_removed_when_it_must_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router may have died: then nobody goes on from it."""
    monkeypatch.setattr(publishing, "TAKEN_OVER_S", 0.0)
    store = MemoryStore()
    world = _running(store, tokens=40)
    assert store.crashes()
    world.engine.cancel(NAME, 1, goes_on=True)
    world.run()
    assert store.crashes() == []


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (DeadlineError("late"), 0),
        (InternalError("broken"), 0),
        (WorkerLostError("gone"), 2),
        (StaleAttemptError("2"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_that_ends_a_request_takes_what_it_left_with_it(error: ServingError, left: int) -> None:
    store = MemoryStore()
    world = _running(store, tokens=40)
    world.engine.fail(NAME, 1, error)
    world.run()
    assert len(store.crashes()) == left


def test_a_prefill_that_is_cancelled_leaves_what_its_request_may_go_on_from() -> None:
    store, said = killed()
    for work, awaits in (Work.PREFILL, False), (Work.GENERATE, True):
        world = World(store=store, options=CRASHES)
        request = world.request(
            prompt_of(TOKENS), LONG, name="name", attempt=2, resumed=said, work=work, await_handoff=awaits
        )
        world.submit(request)
        world.step()
        world.engine.cancel(NAME, 2)
        world.run()
        assert len(store.crashes()) == 2


def test_without_all_of_it_the_request_is_computed_again() -> None:
    store, said = killed()
    del store.blocks[list(store.blocks)[128 // 16 - 1]]
    rest = World(store=store, options=CRASHES).generate(prompt_of(TOKENS), LONG, name="name", attempt=2, resumed=said)
    assert tuple(rest.tokens) == whole()[SAID:]
    assert rest.end.cached_tokens == 32  # R of the prompt: B · ⌊(75 - 28) / 16⌋


@pytest.mark.parametrize(
    ("change", "boundary"),
    # R of the prompt, of the prompt, of prompt and output: B · ⌊(L - 28) / 16⌋
    [("another request", 32), ("other tokens", 32), ("fast", 96)],
)
def test_what_another_history_left_is_not_found(change: str, boundary: int) -> None:
    store, said = killed()
    resumed = [said[0] ^ (change == "other tokens"), *said[1:]]
    name = "other" if change == "another request" else "name"
    fidelity = Fidelity.FAST if change == "fast" else Fidelity.EXACT
    heard = World(store=store, options=CRASHES).generate(
        prompt_of(TOKENS), LONG, name=name, attempt=2, resumed=resumed, fidelity=fidelity
    )
    assert heard.end.cached_tokens == boundary


@pytest.mark.parametrize("role", [ModelRole.FULL, ModelRole.ENCODER])
def test_what_a_dead_rank_left_serves_where_a_prefill_rank_is_asked_too(role: ModelRole) -> None:
    store, said = killed()
    asked = {"name": "name", "attempt": 2, "resumed": said}
    handoff = prefill(World(store=store, role=role, options=CRASHES), prompt_of(TOKENS), LONG, **asked)
    assert handoff.boundary_tokens == (TOKENS + SAID if role is ModelRole.FULL else 46)
    world = World(store=store, options=CRASHES)
    rest = decode(world, prompt_of(TOKENS), handoff, LONG, **asked)
    assert tuple(rest.tokens) == whole()[SAID:]
    rows = sum(work.prompt_rows for work in world.engine.take_works())
    assert rows <= TOKENS + SAID - 128 if role is ModelRole.ENCODER else handoff.cached_tokens == 128
    assert store.handoffs() == []
