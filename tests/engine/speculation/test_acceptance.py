"""Which drafts stand, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from whalepod.core.errors import InternalError, InvalidFieldError
from whalepod.engine.interface import SampledToken
from whalepod.engine.noise import ACCEPT_COIN, uniforms
from whalepod.engine.sampling import Sampler
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.acceptance import Hearing, judge, passes, residual

VOCAB = 8


def logits_of(*best: int) -> NDArray[np.float32]:
    """Rows whose likeliest tokens these are, by far."""
    logits = np.zeros((len(best), VOCAB), np.float32)
    logits[np.arange(len(best)), best] = 20
    return logits


def sampler(**fields: object) -> Sampler:
    return Sampler(SamplingParams(**{"temperature": 0.0, **fields}), key=5, eos_id=1, prompt_ids=(3,))  # type: ignore[arg-type]


def ids(said: Sequence[object]) -> list[int]:
    return [token.id for token in said if isinstance(token, SampledToken)]


def test_a_draft_stands_with_the_ratio_of_the_laws() -> None:
    p, q = np.array([0.3, 0.3, 0.0, 0.9]), np.array([0.6, 0.6, 0.2, 0.1])
    assert passes(p, q, np.array([0.49, 0.51, 1e-9, 0.99])).tolist() == [True, False, False, True]


def test_a_draft_that_could_not_be_drawn_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="could not"):
        passes(np.array([0.5]), np.array([0.0]), np.array([0.5]))


def test_the_residual_has_what_the_draft_had_too_little_of() -> None:
    p, q = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), np.array([[0.2, 0.7, 0.1], [0.2, 0.3, 0.5]])
    assert residual(p, q) == pytest.approx(np.array([[0.3, 0, 0], [0.2, 0.3, 0.5]]))


def test_a_certain_draft_leaves_everything_but_itself() -> None:
    certain = np.array([[0.0, 1.0, 0.0]])
    assert residual(np.array([[0.5, 0.2, 0.3]]), certain) == pytest.approx(np.array([[0.5, 0, 0.3]]))


def test_greedy_drafts_stand_up_to_the_first_that_is_not_the_best_token() -> None:
    hearings = [
        Hearing(sampler(), 4, logits_of(2, 3, 4), (2, 3)),
        Hearing(sampler(), 4, logits_of(2, 3, 4), (2, 5)),
        Hearing(sampler(), 4, logits_of(2, 3, 4), (6, 3)),
        Hearing(sampler(), 4, logits_of(2)),
    ]
    assert [ids(said) for said in judge(hearings)] == [[2, 3, 4], [2, 3], [2], [2]]


def test_each_row_counts_the_drafts_before_it_for_its_penalties() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 2], logits[:, 3] = 1.0, 0.9
    (said,) = judge([Hearing(sampler(presence_penalty=0.5), 4, logits, (2,))])
    assert ids(said) == [2, 3]


def test_every_token_tells_its_own_rows_probability() -> None:
    (said,) = judge([Hearing(sampler(logprobs=1), 4, logits_of(2, 3), (2,))])
    assert [token.top_ids for token in said if isinstance(token, SampledToken)] == [(2,), (3,)]
    assert all(token.logprob is not None for token in said if isinstance(token, SampledToken))


def test_a_row_without_numbers_ends_the_request_only_if_it_is_reached() -> None:
    broken = logits_of(2, 3, 4)
    broken[1] = np.nan
    reached, not_reached = judge([Hearing(sampler(), 4, broken, (2, 3)), Hearing(sampler(), 4, broken, (5, 3))])
    assert ids(reached) == [2]
    assert isinstance(reached[-1], InternalError)
    assert ids(not_reached) == [2]
    assert len(not_reached) == 1


def test_a_draft_that_its_grammar_forbids_never_stands() -> None:
    free, forbidding = np.ones(VOCAB, bool), np.ones(VOCAB, bool)
    forbidding[2] = False
    certain = np.full((1, VOCAB), -np.inf, np.float32)
    certain[0, 2] = 0
    for laws in (None, certain):
        hearing = Hearing(sampler(temperature=1.0), 4, logits_of(2, 3), (2,), laws, (forbidding, free))
        (said,) = judge([hearing])
        assert len(said) == 1
        assert ids(said) != [2]


def test_a_grammar_without_a_way_on_is_an_error_only_behind_a_draft_that_stands() -> None:
    dead = InvalidFieldError("grammar", "no way on")
    free = np.ones(VOCAB, bool)
    stood, fell = judge([Hearing(sampler(), 4, logits_of(2, 3), (draft,), None, (free, dead)) for draft in (2, 5)])
    assert (ids(stood), stood[-1]) == ([2], dead)
    assert (ids(fell), len(fell)) == ([2], 1)


def test_coupled_tokens_are_those_that_are_drawn_without_drafts() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (3, VOCAB)).astype(np.float32)
    alone = [ids(judge([Hearing(sampler(temperature=1.0), 4 + row, logits[row : row + 1])])[0])[0] for row in range(3)]
    (agreeing,) = judge([Hearing(sampler(temperature=1.0), 4, logits, tuple(alone[:2]))])
    assert ids(agreeing) == alone
    other = (alone[0] + 1) % VOCAB
    (differing,) = judge([Hearing(sampler(temperature=1.0), 4, logits, (other, 0))])
    assert ids(differing) == alone[:1]


def test_simulated_acceptance_asks_the_coin_and_not_the_logits() -> None:
    drafts = (5, 6, 7)
    for bias in (0.0, 0.5, 1.0):
        (said,) = judge([Hearing(sampler(temperature=1.0), 4, logits_of(2, 2, 2, 2), drafts)], simulated=bias)
        coins = [float(uniforms(5, position=4 + place, lanes=1, purpose=ACCEPT_COIN)[0]) for place in range(3)]
        stood = next((place for place, coin in enumerate(coins) if coin >= bias), 3)
        assert ids(said) == [*drafts[:stood], 2]
