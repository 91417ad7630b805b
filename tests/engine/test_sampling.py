"""The sampling pipeline: order of its steps, ties, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from whalepod.core.clock import Deadline
from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import EngineRequest, Fidelity
from whalepod.engine.noise import gumbels
from whalepod.engine.sampling import Sampler, best_ids, kept_ids, log_softmax, noise_key
from whalepod.engine.sampling_params import SamplingParams

EOS = 1


def _sampler(
    params: SamplingParams, *, prompt: Sequence[int] = (), outputs: Sequence[int] = (), key: int = 3
) -> Sampler:
    return Sampler(params, key=key, eos_id=EOS, prompt_ids=prompt, output_ids=outputs)


def _logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _greedy(params: SamplingParams, logits: np.ndarray, **known: Sequence[int]) -> int:
    return _sampler(params, **known).draw(logits, position=9).id  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert _greedy(SamplingParams(temperature=0), _logits(0, 0, 2, 2, 1)) == 2


def test_a_temperature_just_above_zero_is_greedy() -> None:
    assert _greedy(SamplingParams(temperature=9e-6), _logits(0, 0, 2, 2, 1)) == 2


def test_bias_can_decide() -> None:
    assert _greedy(SamplingParams(temperature=0, logit_bias={4: 5.0}), _logits(0, 0, 2, 2, 1)) == 4


def test_no_bias_brings_back_an_end_that_min_tokens_forbids() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias={EOS: 100.0}, stop_token_ids=(3,))
    assert _greedy(params, _logits(0, 50, 2, 9, 1), outputs=[0]) == 2
    assert _greedy(params, _logits(0, 50, 2, 9, 1), outputs=[0, 0]) == EOS


def test_ignored_eos_is_not_masked_by_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=(3,))
    assert _greedy(params, _logits(0, 5, 2, 9, 1)) == EOS


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert _greedy(params, _logits(4.0, 2.5), prompt=[0]) == 1
    assert _greedy(params, _logits(-1.0, -1.5), outputs=[0]) == 1
    assert _greedy(params, _logits(4.0, 2.5)) == 0


def test_presence_and_frequency_penalties_count_output_only() -> None:
    frequency = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert _greedy(frequency, _logits(3.0, 1.5), prompt=[0, 0, 0]) == 0
    assert _greedy(frequency, _logits(3.0, 1.5), outputs=[0]) == 0
    assert _greedy(frequency, _logits(3.0, 1.5), outputs=[0, 0]) == 1
    presence = SamplingParams(temperature=0, presence_penalty=2.0)
    assert _greedy(presence, _logits(3.0, 1.5), outputs=[0, 0, 0]) == 1


def test_observed_tokens_count_like_given_ones() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0, min_tokens=2)
    told, given = _sampler(params, prompt=[2]), _sampler(params, prompt=[2], outputs=[0, 0])
    told.observe(0)
    told.observe(0)
    logits = _logits(3.0, 1.5, 0.0)
    assert told.draw(logits, position=3) == given.draw(logits, position=3)


def test_top_k_keeps_exactly_k_and_prefers_low_ids_at_the_border() -> None:
    kept = kept_ids(_logits(1, 3, 2, 2, 2), SamplingParams(top_k=3))
    assert kept.tolist() == [1, 2, 3]


@pytest.mark.parametrize("top_k", [-1, 0, 5, 9])
def test_top_k_is_off_below_one_and_from_the_vocabulary_on(top_k: int) -> None:
    assert len(kept_ids(_logits(1, 3, 2, 2, 2), SamplingParams(top_k=top_k))) == 5


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    assert kept_ids(logits, SamplingParams(top_p=0.69)).tolist() == [1, 2]
    assert kept_ids(logits, SamplingParams(top_p=0.71)).tolist() == [1, 2, 3]
    assert kept_ids(logits, SamplingParams(top_p=1e-9)).tolist() == [1]


def test_top_p_is_of_what_top_k_left() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    # Of {0.4, 0.3}, the first has 0.57: enough for 0.5, where of all it would not be.
    assert kept_ids(logits, SamplingParams(top_k=2, top_p=0.5)).tolist() == [1]


def test_min_p_is_relative_to_the_best_that_is_left() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    assert kept_ids(logits, SamplingParams(min_p=0.6)).tolist() == [1, 2]
    assert kept_ids(logits, SamplingParams(min_p=1.0)).tolist() == [1]


def test_the_draw_is_the_largest_of_scaled_logit_and_noise() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    params = SamplingParams(temperature=0.7)
    for position in range(20):
        expected = np.argmax(logits / np.float32(0.7) + gumbels(8, position=position, lanes=300))
        assert _sampler(params, key=8).draw(logits, position=position).id == expected


def test_draws_follow_the_distribution_that_truncation_leaves() -> None:
    logits = np.log(np.array([0.35, 0.3, 0.2, 0.1, 0.05], np.float32))
    params = SamplingParams(temperature=1.0, top_k=3)
    sampler, draws = _sampler(params), 2000
    counts = np.bincount([sampler.draw(logits, position=position).id for position in range(draws)], minlength=5)
    expected = np.array([0.35, 0.3, 0.2]) / 0.85 * draws
    assert counts[3:].tolist() == [0, 0]
    # χ² with 2 degrees of freedom: 18.4 is the 1 - 1e-4 quantile.
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 18.4


def test_logprobs_are_of_the_raw_logits_whatever_changed_the_draw() -> None:
    logits = _logits(0.5, -1.0, 2.0, 1.0)
    params = SamplingParams(temperature=0, logit_bias={1: 50.0}, logprobs=2)
    token = _sampler(params).draw(logits, position=0)
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    assert token.id == 1
    assert token.logprob == pytest.approx(exact[1], abs=1e-6)
    assert token.top_ids == (2, 3)
    assert token.top_logprobs == pytest.approx(exact[[2, 3]], abs=1e-6)


def test_zero_logprobs_means_the_drawn_token_only_and_none_means_none() -> None:
    assert _sampler(SamplingParams(temperature=0, logprobs=0)).draw(_logits(1, 2), position=0).top_ids == ()
    assert _sampler(SamplingParams(temperature=0)).draw(_logits(1, 2), position=0).logprob is None


def test_log_softmax_survives_large_logits() -> None:
    assert np.allclose(np.exp(log_softmax(_logits(1e4, 1e4))), 0.5)


def test_best_ids_are_ordered_by_value_then_id() -> None:
    assert best_ids(_logits(2, 5, 2, 5, 2), 4).tolist() == [1, 3, 0, 2]
    assert best_ids(_logits(2, 5), 9).tolist() == [1, 0]
    assert best_ids(_logits(2, 5), 0).tolist() == []


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(InternalError):
        _sampler(SamplingParams()).draw(_logits(1, float("nan")), position=0)


def test_noise_is_keyed_by_the_seed_else_by_what_the_request_brings_else_by_its_id() -> None:
    def key(seed: int | None, noise: int | None, name: bytes = b"a" * 16) -> int:
        request = EngineRequest(
            request_id=RequestId(name),
            attempt=1,
            prompt_ids=(5,),
            sampling=SamplingParams(seed=seed),
            fidelity=Fidelity.FAST,
            deadline=Deadline.after(1),
            noise_key=noise,
        )
        return noise_key(request)

    assert key(-1, 9) == 2**64 - 1
    assert key(7, 9) == 7
    assert key(None, 9) == 9
    assert key(None, None) == key(None, None)
    assert key(None, None) != key(None, None, b"b" * 16)


def _allowing(size: int, *ids: int) -> np.ndarray:
    allowed = np.zeros(size, np.bool_)
    allowed[list(ids)] = True
    return allowed


def test_what_a_grammar_forbids_is_never_drawn_whatever_its_logit_and_bias() -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 100.0}, presence_penalty=-2.0)
    sampler = _sampler(params, outputs=[0])
    assert sampler.draw(_logits(90, 0, 3, 2), position=5, allowed=_allowing(4, 1, 3)).id == 3
    drawn = _sampler(SamplingParams(top_k=3, min_p=0.01))
    ids = {drawn.draw(_logits(9, 0, 1, 8), position=at, allowed=_allowing(4, 1, 2)).id for at in range(60)}
    assert ids == {1, 2}


def test_a_grammar_that_allows_one_token_gets_it_at_any_temperature() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=2.0, top_p=0.01), SamplingParams(min_p=1)):
        assert _sampler(params).draw(_logits(50, 0, -50, 9), position=3, allowed=_allowing(4, 2)).id == 2


def test_min_tokens_holds_under_a_grammar_that_lets_something_else_follow() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(2,))
    assert _sampler(params).draw(_logits(0, 9, 8, 1), position=3, allowed=_allowing(4, 1, 2, 3)).id == 3


def test_min_tokens_yields_where_a_grammar_lets_only_an_end_follow() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(2,))
    assert _sampler(params).draw(_logits(0, 9, 8, 1), position=3, allowed=_allowing(4, EOS)).id == EOS
    assert _sampler(params).draw(_logits(0, 9, 8, 1), position=3, allowed=_allowing(4, 2)).id == 2


def test_logprobs_are_of_the_raw_logits_under_a_grammar_too() -> None:
    logits = _logits(4, 3, 2, 1)
    token = _sampler(SamplingParams(temperature=0, logprobs=2)).draw(logits, position=3, allowed=_allowing(4, 3))
    assert (token.id, token.top_ids) == (3, (0, 1))
    assert token.logprob == pytest.approx(float(log_softmax(logits)[3]))
