"""The sampling pipeline: order of its steps, ties, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from whalepod.core.clock import Deadline
from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import EngineRequest, Fidelity, SampledToken
from whalepod.engine.noise import gumbels
from whalepod.engine.sampling import (
    DrawRow,
    Sampler,
    draw_ids,
    draw_rows,
    logprobs_at,
    noise_key,
    probabilities,
    process_rows,
)
from whalepod.engine.sampling_params import SamplingParams

EOS = 1


def _sampler(
    params: SamplingParams, *, prompt: Sequence[int] = (), outputs: Sequence[int] = (), key: int = 3
) -> Sampler:
    return Sampler(params, key=key, eos_id=EOS, prompt_ids=prompt, output_ids=outputs)


def _logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _draw(sampler: Sampler, logits: np.ndarray, position: int = 3, allowed: np.ndarray | None = None) -> SampledToken:
    """One row, alone."""
    token = draw_rows(logits[None], [DrawRow(sampler, position, allowed=allowed)])[0]
    assert isinstance(token, SampledToken)
    return token


def _greedy(params: SamplingParams, logits: np.ndarray, **known: Sequence[int]) -> int:
    return _draw(_sampler(params, **known), logits).id  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.1e-5, 1000.0])
@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_a_token_can_be_drawn_at_the_ends_of_every_range(temperature: float, penalty: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=penalty,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={2: 100.0, 3: -100.0},
        top_p=1e-9,
        min_p=1,
        min_tokens=1,
    )
    sampler = _sampler(params, prompt=(0, 1, 2, 3), outputs=())
    with np.errstate(all="raise", under="ignore"):
        assert _draw(sampler, _logits(1e4, -1e4, 1e4, -1e4, 0)).id in (0, 2)


def test_min_tokens_yields_where_every_token_is_an_end() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(0, 2))
    assert _draw(_sampler(params), _logits(0, 0, 0)).id in (0, 1, 2)


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
    assert _draw(told, logits) == _draw(given, logits)


def test_the_draw_is_the_largest_of_scaled_logit_and_noise() -> None:
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    params = SamplingParams(temperature=0.7)
    for position in range(20):
        expected = np.argmax(logits / np.float32(0.7) + gumbels(8, position=position, lanes=300))
        assert _draw(_sampler(params, key=8), logits, position).id == expected


def test_draws_follow_the_distribution_that_truncation_leaves() -> None:
    logits = np.log(np.array([0.35, 0.3, 0.2, 0.1, 0.05], np.float32))
    params = SamplingParams(temperature=1.0, top_k=3)
    sampler, draws = _sampler(params), 2000
    counts = np.bincount([_draw(sampler, logits, position).id for position in range(draws)], minlength=5)
    expected = np.array([0.35, 0.3, 0.2]) / 0.85 * draws
    assert counts[3:].tolist() == [0, 0]
    # χ² with 2 degrees of freedom: 18.4 is the 1 - 1e-4 quantile.
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 18.4


def test_logprobs_are_of_the_raw_logits_whatever_changed_the_draw() -> None:
    logits = _logits(0.5, -1.0, 2.0, 1.0)
    params = SamplingParams(temperature=0, logit_bias={1: 50.0}, logprobs=2)
    token = _draw(_sampler(params), logits)
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    assert token.id == 1
    assert token.logprob == pytest.approx(exact[1], abs=1e-6)
    assert token.top_ids == (2, 3)
    assert token.top_logprobs == pytest.approx(exact[[2, 3]], abs=1e-6)


def test_zero_logprobs_means_the_drawn_token_only_and_none_means_none() -> None:
    assert _draw(_sampler(SamplingParams(temperature=0, logprobs=0)), _logits(1, 2)).top_ids == ()
    assert _draw(_sampler(SamplingParams(temperature=0)), _logits(1, 2)).logprob is None


def test_log_softmax_survives_large_logits() -> None:
    assert np.allclose(np.exp(logprobs_at(_logits(1e4, 1e4)[None], np.array([[0, 1]]))), 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_of_their_row(value: float) -> None:
    logits = np.stack([_logits(1, 2), _logits(1, value), _logits(3, 2)])
    rows = [DrawRow(_sampler(SamplingParams(temperature=0, logprobs=1)), 0)] * 3
    first, second, third = draw_rows(logits, rows)
    assert isinstance(first, SampledToken)
    assert isinstance(second, InternalError)
    assert isinstance(third, SampledToken)
    assert (first.id, third.id, third.top_ids) == (1, 0, (0,))


def test_noise_is_keyed_by_the_seed_else_by_what_the_request_brings_else_by_its_id() -> None:
    def key(seed: int | None, noise: int | None, name: bytes = b"a" * 16, branch: int = 0) -> int:
        request = EngineRequest(
            request_id=RequestId(name),
            attempt=1,
            prompt_ids=(5,),
            sampling=SamplingParams(seed=seed),
            fidelity=Fidelity.FAST,
            deadline=Deadline.after(1),
            noise_key=noise,
            branch=branch,
        )
        return noise_key(request)

    assert key(-1, 9) == 2**64 - 1
    assert key(7, 9) == 7
    assert key(None, 9) == 9
    assert key(None, None) == key(None, None)
    assert key(None, None) != key(None, None, b"b" * 16)
    assert len({key(7, 9, branch=branch) for branch in range(100)} | {7}) == 100, "every choice has its own"
    assert key(7, 9, branch=3) == key(7, None, b"b" * 16, branch=3) != key(None, 9, branch=3)


def _allowing(size: int, *ids: int) -> np.ndarray:
    allowed = np.zeros(size, np.bool_)
    allowed[list(ids)] = True
    return allowed


def test_what_a_grammar_forbids_is_never_drawn_whatever_its_logit_and_bias() -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 100.0}, presence_penalty=-2.0)
    sampler = _sampler(params, outputs=[0])
    assert _draw(sampler, _logits(90, 0, 3, 2), 5, _allowing(4, 1, 3)).id == 3
    drawn = _sampler(SamplingParams(top_k=3, min_p=0.01))
    ids = {_draw(drawn, _logits(9, 0, 1, 8), at, _allowing(4, 1, 2)).id for at in range(60)}
    assert ids == {1, 2}


def test_a_grammar_that_allows_one_token_gets_it_at_any_temperature() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=2.0, top_p=0.01), SamplingParams(min_p=1)):
        assert _draw(_sampler(params), _logits(50, 0, -50, 9), 3, _allowing(4, 2)).id == 2


def test_min_tokens_holds_under_a_grammar_that_lets_something_else_follow() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(2,))
    assert _draw(_sampler(params), _logits(0, 9, 8, 1), 3, _allowing(4, 1, 2, 3)).id == 3


def test_min_tokens_yields_where_a_grammar_lets_only_an_end_follow() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(2,))
    assert _draw(_sampler(params), _logits(0, 9, 8, 1), 3, _allowing(4, EOS)).id == EOS
    assert _draw(_sampler(params), _logits(0, 9, 8, 1), 3, _allowing(4, 2)).id == 2


def test_logprobs_are_of_the_raw_logits_under_a_grammar_too() -> None:
    logits = _logits(4, 3, 2, 1)
    token = _draw(_sampler(SamplingParams(temperature=0, logprobs=2)), logits, 3, _allowing(4, 3))
    assert (token.id, token.top_ids) == (3, (0, 1))
    assert token.logprob == pytest.approx(float(logprobs_at(logits[None], np.array([[3]]))[0, 0]))


def _random_params(rng: Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 1.7)),
        top_p=rng.choice((1.0, 0.9, 0.2)),
        top_k=rng.choice((-1, 1, 5, 40, vocab_size)),
        min_p=rng.choice((0.0, 0.05)),
        min_tokens=rng.choice((0, 30)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(vocab_size), 2)),
        logprobs=rng.choice((None, 0, 3, 20)),
        presence_penalty=rng.choice((0.0, 0.5, -1.0)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        logit_bias={rng.randrange(vocab_size): rng.uniform(-5, 5) for _ in range(rng.choice((0, 3)))},
    )


def _random_rows(rng: Random, count: int, vocab_size: int) -> list[DrawRow]:
    rows: list[DrawRow] = []
    for _ in range(count):
        prompt, outputs, drafts = ([rng.randrange(vocab_size) for _ in range(rng.choice((0, n)))] for n in (20, 20, 5))
        sampler = _sampler(_random_params(rng, vocab_size), prompt=prompt, outputs=outputs, key=rng.randrange(2**64))
        allowed = None
        if rng.random() < 0.3:
            allowed = _allowing(vocab_size, *rng.sample(range(vocab_size), 50))
        rows.append(DrawRow(sampler, rng.randrange(1000), drafts, allowed))
    return rows


def _bits(logits: np.ndarray, rows: Sequence[DrawRow]) -> list[tuple[bytes, object]]:
    """Of each row: its law, and the token that is drawn."""
    laws = process_rows(logits, rows)
    return [(law.tobytes(), token) for law, token in zip(laws, draw_rows(logits, rows), strict=True)]


@pytest.mark.parametrize("vocab_size", [512, 6144, 1001])
def test_a_row_gives_the_same_bits_alone_and_among_any_others(vocab_size: int) -> None:
    rng = Random(vocab_size)
    rows = _random_rows(rng, 64, vocab_size)
    logits = np.random.default_rng(vocab_size).normal(0, 3, (64, vocab_size)).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # many of these are alike
    alone = [_bits(logits[index, None], [row])[0] for index, row in enumerate(rows)]
    for count in (2, 7, 64):
        chosen = rng.sample(range(64), count)
        assert _bits(logits[chosen], [rows[index] for index in chosen]) == [alone[index] for index in chosen]
    # The control: what depends on the neighbours in the last places only is seen.
    leaky = _bits(logits * np.float32(1 + 2**-22), rows)
    assert sum(ours != theirs for ours, theirs in zip(alone, leaky, strict=True)) > 32


def test_what_is_drawn_is_the_largest_sum_in_double_precision() -> None:
    weights = np.random.default_rng(1).normal(0, 2, (40, 3000)).astype(np.float32)
    weights[:, 100:200] = -np.inf
    rows = [DrawRow(_sampler(SamplingParams(), key=key), 5 + key) for key in range(40)]
    noise = np.stack([gumbels(key, position=5 + key, lanes=3000) for key in range(40)])
    assert draw_ids(weights, rows).tolist() == (weights + noise).argmax(axis=1).tolist()


def test_drafts_count_like_tokens_that_were_observed() -> None:
    rng = Random(4)
    logits = np.random.default_rng(4).normal(0, 2, (1, 300)).astype(np.float32)
    for _ in range(50):
        params = _random_params(rng, 300)
        outputs = [rng.randrange(300) for _ in range(28)] * 2
        drafts = outputs[:2] + [rng.randrange(300) for _ in range(3)]
        known = _sampler(params, prompt=outputs[:5], outputs=[*outputs, *drafts])
        ahead = _sampler(params, prompt=outputs[:5], outputs=outputs)
        for _ in range(2):  # and they leave nothing behind
            assert _bits(logits, [DrawRow(known, 9)]) == _bits(logits, [DrawRow(ahead, 9, drafts)])


def test_probabilities_are_the_law_of_the_draw() -> None:
    logits = np.log(np.array([[0.35, 0.3, 0.2, 0.1, 0.05]] * 2, np.float32))
    rows = [DrawRow(_sampler(SamplingParams(top_k=3)), 0), DrawRow(_sampler(SamplingParams(temperature=0)), 0)]
    law = probabilities(process_rows(logits, rows))
    assert law[0] == pytest.approx(np.array([0.35, 0.3, 0.2, 0, 0]) / 0.85, abs=1e-7)
    assert law[1].tolist() == [1, 0, 0, 0, 0]
