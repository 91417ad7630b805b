"""A request ends where it would end on one rank, whichever rank draws its first token; and none stalls the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, decode, oracle, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.engine.interface import FinishReason
from whalepod.model.tensor_layout import ModelRole


@pytest.mark.parametrize(
    ("role", "max_tokens"), [(ModelRole.FULL, 1), (ModelRole.FULL, 2), (ModelRole.ENCODER, 1), (ModelRole.ENCODER, 3)]
)
def test_b1_b2_exactly_max_tokens_come_out_across_a_handoff(role: ModelRole, max_tokens: int) -> None:
    store, few = MemoryStore(), replace(GREEDY, max_tokens=max_tokens)
    handoff = prefill(World(store=store, role=role), prompt_of(40), few, name="x")
    heard = decode(World(store=store), prompt_of(40), handoff, few, name="x")
    assert tuple(heard.tokens) == oracle(40)[:max_tokens]
    assert heard.end.reason is FinishReason.LENGTH


@pytest.mark.parametrize("ending", ["stop id", "end of sequence"])
@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_b4_what_ends_a_request_is_asked_once_wherever_its_first_token_is_drawn(min_tokens: int, ending: str) -> None:
    """The likeliest first token ends it, unless `min_tokens` forbids: then both ranks draw as one would alone."""
    first = oracle(40)[0].id
    bias = {} if ending == "stop id" else {tiny_model().config.eos_token_id: 100.0}
    sampling = replace(GREEDY, max_tokens=4, min_tokens=min_tokens, logit_bias=bias, ignore_eos=False)
    if ending == "stop id":
        sampling = replace(sampling, stop_token_ids=(first,))
    alone = World().generate(prompt_of(40), sampling)
    store = MemoryStore()
    handoff = prefill(World(store=store), prompt_of(40), sampling, name="x")
    heard = decode(World(store=store), prompt_of(40), handoff, sampling, name="x")
    assert tuple(heard.tokens) == tuple(alone.tokens)
    assert (heard.end.reason, heard.end.matched_stop_id) == (alone.end.reason, alone.end.matched_stop_id)
    if not min_tokens:
        assert len(heard.tokens) == 1
        assert heard.end.reason is FinishReason.STOP
    else:
        assert len(heard.tokens) > min_tokens


def test_a_long_recompute_stalls_no_step_of_a_running_batch() -> None:
    """Beside decode rows every step computes a bounded number of other rows, however long the prompts that wait."""
    options = replace(OPTIONS, chunk_tokens=512, chunk_tokens_beside_decode=8)
    world = World(options=options)
    running = world.submit(world.request(prompt_of(20), replace(GREEDY, max_tokens=40)))
    while not running.tokens:
        world.step()
    late = [world.submit(world.request(prompt_of(90, seed=seed), GREEDY)) for seed in (1, 2)]
    while len(running.tokens) < 30:
        said = len(running.tokens)
        world.step()
        assert len(running.tokens) == said + 1, "a token in every step"
        (work,) = world.engine.take_works()[-1:]
        assert work.prompt_rows <= options.chunk_tokens_beside_decode
    world.run()
    assert [len(heard.tokens) for heard in late] == [4, 4]
