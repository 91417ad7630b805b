"""Requests that go on where another rank has left off: in `exact`, nobody can tell that anything happened."""

from __future__ import annotations

import pytest

from tests.engine.engine_world import World, decode, prefill, prompt_of
from tests.engine.memory_store import MemoryStore
from whalepod.core.errors import ContextLengthError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams
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
