"""A given answer is scored by the engine's own rows: like prompt scores in mode `off`, and like a cold request after an
exact hit. Bounded replay differs, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import prompt_of, tiny_model
from whalepod.engine.evaluation.measured_engine import Answered, Asked, MeasuredEngine
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams

TEXT = prompt_of(112)
ONCE = SamplingParams(temperature=0, max_tokens=1)


def asked(*, before: bool = False, fidelity: Fidelity = Fidelity.EXACT, **sampling: int) -> Answered:
    """12 tokens behind 100. `before`: another request had the first 90."""
    engine = MeasuredEngine(tiny_model(), context_tokens=120, reuse=before, stored_tokens=100)
    try:
        if before:
            engine.run([Asked(TEXT[:90], ONCE, fidelity=fidelity)])
        params = replace(SamplingParams(temperature=0), **sampling)
        (answer,) = engine.run([Asked(TEXT[:100], params, said=TEXT[100:], fidelity=fidelity)])
    finally:
        engine.close()
    return answer


def test_a_given_answer_is_said_and_scored_like_the_same_tokens_of_a_prompt() -> None:
    engine = MeasuredEngine(tiny_model(), context_tokens=120)
    (scored,) = engine.run([Asked(TEXT, replace(ONCE, prompt_logprobs=0), fidelity=Fidelity.EXACT)])
    engine.close()
    answer = asked(prompt_logprobs=0)
    assert answer.ids == list(TEXT[100:])
    assert answer.said == pytest.approx(scored.prompt[99:], abs=1e-5)
    assert answer.prompt == pytest.approx(scored.prompt[:99], abs=1e-5)


def test_an_exact_hit_scores_like_a_cold_request_and_bounded_replay_does_not() -> None:
    cold, exact = asked(), asked(before=True)
    fast = asked(before=True, fidelity=Fidelity.FAST)
    assert (cold.cached_tokens, exact.cached_tokens, fast.cached_tokens) == (0, 64, 64)
    assert fast.replayed_tokens == tiny_model().config.window < exact.replayed_tokens
    assert exact.said == cold.said
    assert max(abs(one - other) for one, other in zip(fast.said, cold.said, strict=True)) > 1e-3


def test_requests_are_told_apart() -> None:
    engine = MeasuredEngine(tiny_model(), context_tokens=120)
    one, other, free = engine.run(
        [
            Asked(TEXT[:50], said=TEXT[50:60]),
            Asked(TEXT[:50], said=TEXT[70:75]),
            Asked(TEXT[:50], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)),
        ]
    )
    engine.close()
    assert (one.ids, len(one.said)) == (list(TEXT[50:60]), 10)
    assert (other.ids, len(other.said)) == (list(TEXT[70:75]), 5)
    assert (len(free.ids), free.said) == (3, [])
    assert free.ids[0] not in (TEXT[50], TEXT[70]), "nobody's answer was given to it"
