"""Log-probabilities of prompts: of every row, whatever the chunks, and with no row left out (mode `off`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, Heard, World, oracle, prompt_of
from tests.engine.memory_store import MemoryStore
from tests.model.network_world import tiny_a, whole
from whalepod.core.errors import InternalError
from whalepod.engine import prompt_scores
from whalepod.engine.interface import EngineRequest, FinishReason, SampledToken, Work
from whalepod.engine.options import RankOptions
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS

TOKENS = 61
SCORED = replace(SEEDED, prompt_logprobs=3)


def logprobs_of(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """[tokens, vocab] float32 after each of these tokens, all rows at every layer, in one forward."""
    logits = whole(tiny_a(), list(tokens), formats=RELEASE_FORMATS).double()
    return torch.log_softmax(logits, dim=1).float().numpy()


@cache
def cold() -> tuple[tuple[SampledToken, ...], tuple[SampledToken, ...]]:
    return said(World(options=replace(OPTIONS, slots=1, chunk_tokens=512)).generate(prompt_of(TOKENS), SCORED))


def said(heard: Heard) -> tuple[tuple[SampledToken, ...], tuple[SampledToken, ...]]:
    return tuple(heard.prompt), tuple(heard.tokens)


def test_every_token_after_the_first_is_scored_by_the_row_before_it() -> None:
    prompt = prompt_of(TOKENS)
    scores, _ = cold()
    expected = logprobs_of(prompt)
    assert [score.id for score in scores] == list(prompt[1:])
    for row, score in enumerate(scores):
        assert score.logprob == pytest.approx(expected[row, score.id], abs=1e-6)
        best = np.lexsort((np.arange(expected.shape[1]), -expected[row]))[:3]
        assert score.top_ids == tuple(best)
        assert score.top_logprobs == pytest.approx(expected[row, best], abs=1e-6)


def test_no_row_is_left_out_before_or_after() -> None:
    """Decode rows, too, give what a prompt of the same tokens gives; with truncation they do not."""
    prompt, greedy = prompt_of(TOKENS), replace(GREEDY, prompt_logprobs=0)
    heard = World().generate(prompt, greedy)
    expected = logprobs_of([*prompt, *heard.ids])
    for index, token in enumerate(heard.tokens):
        row = expected[TOKENS - 1 + index]
        assert token.id == row.argmax()
        assert token.logprob == pytest.approx(row[token.id], abs=1e-6)
    truncated = oracle(TOKENS)
    assert truncated[0].logprob != pytest.approx(expected[TOKENS - 1, truncated[0].id], abs=1e-6)


def test_decode_gives_the_bits_of_prefill_for_the_same_token() -> None:
    """A longer prompt scores what a shorter one drew."""
    heard = World().generate(prompt_of(TOKENS), replace(SEEDED, prompt_logprobs=2, max_tokens=12))
    again = World().generate([*prompt_of(TOKENS), *heard.ids], SCORED)
    drawn = again.prompt[TOKENS - 1 :]
    assert len(drawn) == 12
    assert [(token.id, token.logprob) for token in drawn] == [(token.id, token.logprob) for token in heard.tokens]


def options_for(name: str) -> RankOptions:
    return {
        "small chunks": replace(OPTIONS, chunk_tokens=7),
        "one step ahead": replace(OPTIONS, chunk_tokens=16, async_scheduling=True),
        "preempted and parked": replace(OPTIONS, blocks=9, chunk_tokens=24),
        "preempted, from nothing": replace(OPTIONS, blocks=9, chunk_tokens=24, parked_bytes=0),
    }[name]


@pytest.mark.parametrize("name", ["small chunks", "one step ahead", "preempted and parked", "preempted, from nothing"])
def test_schedules_change_no_score(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalepod.engine.runner.SCORED_VALUES_AT_ONCE", 3 * 512)
    long = replace(SCORED, max_tokens=8)
    world = World(options=options_for(name))
    heard = [world.submit(world.request(prompt_of(TOKENS), long)) for _ in range(2)]
    world.run()
    world.engine.close()
    assert world.engine.preempted > 0 or "preempted" not in name
    for each in heard:
        scores, tokens = said(each)
        assert (scores, tokens[:4]) == cold()


def test_logits_are_there_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalepod.engine.runner.SCORED_VALUES_AT_ONCE", 5 * 512)
    rows, logits = list[int](), Network.logits

    def counted(self: Network, *arguments: Any, **names: Any) -> torch.Tensor:
        result = logits(self, *arguments, **names)
        rows.append(len(result))
        return result

    monkeypatch.setattr(Network, "logits", counted)
    assert said(World().generate(prompt_of(TOKENS), SCORED)) == cold()
    assert max(rows) == 5
    assert prompt_scores.SCORED_VALUES_AT_ONCE * 4 <= 16 << 20


def test_no_stored_prefix_is_used_but_what_is_stored_serves_others() -> None:
    store = MemoryStore()
    first = World(store=store).generate(prompt_of(92), replace(SCORED, max_tokens=1))
    second = World(store=store).generate(prompt_of(92), replace(SCORED, max_tokens=1))
    assert (first.end.cached_tokens, second.end.cached_tokens) == (0, 0)
    assert said(first) == said(second)
    other = World(store=store).generate(prompt_of(92), SEEDED)
    assert other.end.cached_tokens == 64
    assert tuple(other.tokens) == oracle(92, SEEDED)


def test_choices_that_meet_are_told_once() -> None:
    world = World(options=replace(OPTIONS, chunk_tokens=16))
    first = world.request(prompt_of(TOKENS), SCORED, name="first")
    second = replace(
        first, request_id=world.request([1], name="second").request_id, branch=1, branch_of=first.request_id
    )
    heard = [world.submit(first), world.submit(second)]
    world.run()
    assert said(heard[0]) == cold()
    assert heard[1].prompt == []
    assert heard[1].ids != heard[0].ids


def test_one_token_has_no_score() -> None:
    heard = World().generate(prompt_of(1), replace(SCORED, max_tokens=1))
    assert (heard.prompt, len(heard.tokens)) == ([], 1)


def test_logits_that_are_no_numbers_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(Network, "logits", lambda self, run, **_: torch.full((61, 512), float("nan")))
    heard = world.generate(prompt_of(TOKENS), SCORED)
    assert (heard.end.reason, heard.prompt) == (FinishReason.ERROR, [])
    assert isinstance(heard.end.error, InternalError)


@pytest.mark.parametrize("changes", [{"work": Work.PREFILL}, {"await_handoff": True}])
def test_a_rank_that_does_only_half_of_it_refuses(changes: dict[str, Any]) -> None:
    world = World()
    request: EngineRequest = world.request(prompt_of(TOKENS), SamplingParams(prompt_logprobs=0), **changes)
    with pytest.raises(InternalError, match="where its answer is"):
        world.engine.checks.check(request)


def test_rows_behind_the_prompt_score_nothing() -> None:
    """Answers that are computed again, several rows at a time."""
    wanted = prompt_scores.PromptScores((1, 2, 3), top=1).wanted(3, 6)
    assert (len(wanted), wanted.start) == (0, wanted.stop), "it can be sliced with"
