"""How many drafts are verified: the best total, prefixes only, and nothing that looks ahead."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.scheduling import allot, best_budget, stop_early, survivals


def linear(per_row: float, *, bias: float = 1.0, rows_max: int = 1000) -> CostTable:
    return CostTable(bias=bias, requests=[(1, 0.0)], rows=[(0, 0.0), (rows_max, per_row * rows_max)], draft=[(1, 0.0)])


def random_survival(rng: np.random.Generator, *shape: int) -> np.ndarray:
    requests, columns = shape[-2:]
    limits = rng.integers(0, columns + 1, (*shape[:-2], requests))
    return survivals(rng.normal(1, 2, shape), np.ones(columns), limits)


def test_survivals_fall_along_a_request_and_end_at_its_limit() -> None:
    survival = survivals(np.array([[0.0, 2.0, -1.0], [9.0, 9.0, 9.0]]), np.array([1.0, 2.0, 1.0]), np.array([3, 1]))
    sigmoid = [0.5, 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(1.0))]
    assert survival[0] == pytest.approx(np.cumprod(sigmoid))
    assert survival[1, 0] == pytest.approx(1 / (1 + np.exp(-9.0)))
    assert survival[1, 1:].tolist() == [0, 0]


def test_slots_are_the_most_valuable_and_always_prefixes() -> None:
    rng = np.random.default_rng(0)
    for budget in (0, 1, 3, 8, 100):
        survival = random_survival(rng, 200, 5, 4)
        lengths = allot(survival, budget)
        there = (survival > 0).sum(axis=-1)
        assert (lengths <= there).all()
        assert (lengths.sum(axis=-1) == np.minimum(budget, there.sum(axis=-1))).all()
        best = [
            np.sort(batch[batch > 0])[::-1][:budget].sum() for batch in survival
        ]  # whatever the slots are, no more than this
        verified = np.arange(4) < lengths[..., None]
        assert np.where(verified, survival, 0).sum(axis=(-2, -1)) == pytest.approx(np.array(best))


def test_ties_go_to_earlier_columns_then_to_earlier_requests() -> None:
    ones = np.ones((3, 2))
    assert [allot(ones, budget).tolist() for budget in range(4)] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert allot(ones, 5).tolist() == [2, 2, 1]


def test_permuting_requests_permutes_their_lengths() -> None:
    rng = np.random.default_rng(1)
    survival = random_survival(rng, 6, 5)
    order = rng.permutation(6)
    for budget in range(31):
        assert (allot(survival[order], budget) == allot(survival, budget)[order]).all()


def test_the_budget_is_the_global_best_and_not_the_first_descent() -> None:
    stair = CostTable(bias=0.0, requests=[(1, 0.0)], rows=[(1, 1.0), (2, 1.9), (3, 1.9), (4, 1.91)], draft=[(1, 0.0)])
    survival = np.array([[0.9, 0.8, 0.7]])
    budget, ratio = best_budget(survival, stair)
    assert (int(budget), float(ratio)) == (3, 1.0)
    assert int(stop_early(survival, stair)) == 0


def test_the_best_budget_agrees_with_trying_them_all() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        survival, cost = random_survival(rng, 4, 3), linear(float(rng.uniform(0.01, 0.5)))
        budget, ratio = best_budget(survival, cost)
        values = np.sort(survival[survival >= 1e-6])[::-1]
        rates = [
            (4 + values[:count].sum()) / float(cost.step_seconds(4, np.array(4 + count)))
            for count in range(len(values) + 1)
        ]
        assert int(budget) == int(np.argmax(rates))
        assert float(ratio) == pytest.approx(max(rates) / rates[-1])


def test_dearer_rows_never_raise_the_budget_and_a_dearer_step_never_lowers_it() -> None:
    survival = random_survival(np.random.default_rng(3), 500, 6, 5)
    by_row = [best_budget(survival, linear(cost))[0] for cost in (0.001, 0.01, 0.05, 0.2, 1.0)]
    by_step = [best_budget(survival, linear(0.1, bias=bias))[0] for bias in (0.1, 1.0, 5.0, 50.0)]
    assert all((steep <= flat).all() for flat, steep in itertools.pairwise(by_row))
    assert all((small <= large).all() for small, large in itertools.pairwise(by_step))


def test_early_stopping_finds_the_best_where_the_cost_has_no_stairs() -> None:
    survival = random_survival(np.random.default_rng(4), 500, 6, 5)
    for per_row in (0.01, 0.1, 0.5):
        assert (stop_early(survival, linear(per_row)) <= best_budget(survival, linear(per_row))[0]).all()
        same = stop_early(survival, linear(per_row)) == best_budget(survival, linear(per_row))[0]
        assert same.mean() > 0.99


def test_whether_a_slot_is_stopped_at_depends_on_no_later_draft() -> None:
    rng = np.random.default_rng(5)
    log_odds = rng.normal(1, 2, (300, 3, 4))
    other = log_odds.copy()
    other[:, 0, 2:] = rng.normal(1, 2, (300, 2))  # what the drafts behind slot 2 of request 0 are worth
    cost, ones, limits = linear(0.3), np.ones(4), np.full((300, 3), 4)
    verified: list[np.ndarray] = []
    for odds in (log_odds, other):
        survival = survivals(odds, ones, limits)
        verified.append(allot(survival, stop_early(survival, cost))[:, 0] >= 2)
    assert (verified[0] == verified[1]).all()
    same_step = [
        allot(s, best_budget(s, cost)[0])[:, 0] >= 2
        for s in (survivals(odds, ones, limits) for odds in (log_odds, other))
    ]
    assert (same_step[0] == same_step[1]).all(), "without stairs the global best is no worse"


def test_a_same_step_optimum_over_stairs_looks_ahead() -> None:
    stair = CostTable(bias=0.0, requests=[(1, 0.0)], rows=[(1, 1.0), (2, 1.7), (3, 1.85)], draft=[(1, 0.0)])
    good, bad = np.array([[0.6, 0.55]]), np.array([[0.6, 0.01]])
    assert [int(best_budget(survival, stair)[0]) for survival in (good, bad)] == [2, 0]
    assert [int(stop_early(survival, stair)) for survival in (good, bad)] == [0, 0]
