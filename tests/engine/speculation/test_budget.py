"""Totals are planned from old confidences only, and trimming is left alone where it gains too little."""

from __future__ import annotations

import numpy as np

from whalepod.engine.speculation.budget import BudgetPlanner
from whalepod.engine.speculation.cost_table import CostTable

DEAR = CostTable(bias=2.0, requests=[(1, 0.0)], rows=[(0, 0.0), (100, 100.0)], draft=[(1, 0.0)])
CHEAP = CostTable(bias=100.0, requests=[(1, 0.0)], rows=[(0, 0.0), (100, 0.001)], draft=[(1, 0.0)])
HOLDERS = [(0, 1), (1, 1)]
BAD = {holder: np.array([0.1, 0.01]) for holder in HOLDERS}
GOOD = {holder: np.array([0.9, 0.8]) for holder in HOLDERS}


def planner(cost: CostTable = DEAR, *, gain_min: float = 0.0) -> BudgetPlanner:
    return BudgetPlanner(cost, columns=2, gain_min=gain_min, lag_steps=2)


def test_nothing_known_means_all_drafts_are_verified() -> None:
    assert planner().plan(0, HOLDERS, [2, 2]) is None
    assert planner().plan(0, [], []) is None


def test_the_newest_confidences_that_are_old_enough_decide() -> None:
    asked = planner()
    asked.observe(0, GOOD)
    asked.observe(1, BAD)
    assert asked.plan(1, HOLDERS, [2, 2]) is None, "only steps 0 and 1 are known, and both are too young"
    with_good = asked.plan(2, HOLDERS, [2, 2])
    asked.observe(2, BAD)
    assert asked.plan(3, HOLDERS, [2, 2]) == 0
    assert with_good is not None
    assert with_good > 0


def test_another_holder_of_a_slot_inherits_nothing() -> None:
    asked = planner()
    asked.observe(0, BAD)
    assert asked.plan(2, HOLDERS, [2, 2]) == 0
    assert asked.plan(2, [(0, 2), (1, 2)], [2, 2]) is None
    mixed = asked.plan(2, [(0, 1), (1, 2)], [2, 2])
    assert mixed is not None
    assert mixed >= 2, "the new one counts as good"


def test_what_is_forgotten_decides_nothing() -> None:
    asked = planner()
    asked.observe(0, BAD)
    assert asked.plan(2, HOLDERS, [2, 2]) == 0
    assert asked.gain > 0
    asked.forget()
    assert asked.plan(2, HOLDERS, [2, 2]) is None
    assert asked.gain == 0


def test_a_request_near_its_end_asks_for_no_more_than_it_can_say() -> None:
    asked = planner(CHEAP)
    asked.observe(0, GOOD)
    assert asked.plan(2, HOLDERS, [2, 2]) == 4
    assert asked.plan(2, HOLDERS, [2, 0]) == 2


def test_trimming_that_gains_too_little_is_left_alone() -> None:
    asked = planner(CHEAP, gain_min=0.02)
    asked.observe(0, BAD)
    assert [asked.plan(2, HOLDERS, [2, 2]) for _ in range(300)] == [None] * 300
    eager = planner(DEAR, gain_min=0.02)
    eager.observe(0, BAD)
    assert [eager.plan(2, HOLDERS, [2, 2]) for _ in range(300)][-1] == 0
