"""The number of drafts that a step verifies, planned before its drafts are known.

Survivals come back with the results of a step; the plan of a later one uses the newest that are `lag_steps` old. They
tell nothing about its drafts, because draft noise is never used twice: not even for the same position, if it is drafted
again in another column (`runtime.md` §2.5, §4.4).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .cost_table import CostTable
from .options import SpeculationOptions, Verification
from .scheduling import best_budget

log = logging.getLogger(__name__)

Holder = tuple[int, int]
"""Slot and generation: a request as long as it holds its slot."""

SMOOTHING: Final = 0.01
"""Weight of a step in the running mean of what trimming gains."""


class BudgetPlanner:
    """Belongs to the thread that plans steps."""

    def __init__(self, cost: CostTable, *, columns: int, gain_min: float, lag_steps: int) -> None:
        """Where trimming has lately gained less than `gain_min`, all drafts are verified: the uniform path is cheaper
        than its rows say."""
        self._cost = cost
        self._columns = columns
        self._gain_min = gain_min
        self._lag_steps = lag_steps
        self._past: deque[tuple[int, Mapping[Holder, NDArray[np.floating[Any]]]]] = deque(maxlen=lag_steps + 1)
        self.gain = 0.0
        """What trimming would have gained over verifying all, lately."""

    def observe(self, step: int, survivals: Mapping[Holder, NDArray[np.floating[Any]]]) -> None:
        """What the drafts of a step were worth, [columns] each. Steps come in order."""
        self._past.append((step, survivals))

    def forget(self) -> None:
        """Nothing was observed so far."""
        self._past.clear()
        self.gain = 0.0

    def plan(self, step: int, holders: Sequence[Holder], limits: Sequence[int]) -> int | None:
        """Drafts of these requests that a step verifies together; None: all of them.

        `limits`: how many each may verify. A request that nothing is known of is taken to have only good drafts.
        """
        known = self._known(step)
        if not holders or not any(holder in known for holder in holders):
            return None
        ones = np.ones(self._columns)
        survival = np.stack([known.get(holder, ones) for holder in holders])
        survival[np.arange(self._columns) >= np.array(limits)[:, None]] = 0
        best, ratio = best_budget(survival, self._cost)
        self.gain += SMOOTHING * (float(ratio) - 1 - self.gain)
        return int(best) if self.gain >= self._gain_min else None

    def _known(self, step: int) -> Mapping[Holder, NDArray[np.floating[Any]]]:
        for observed, survivals in reversed(self._past):
            if observed <= step - self._lag_steps:
                return survivals
        return {}


class ForcedBudget:
    """For measuring: the same number for every step."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def observe(self, step: int, survivals: Mapping[Holder, NDArray[np.floating[Any]]]) -> None:
        """Changes nothing."""

    def forget(self) -> None:
        """Changes nothing."""

    def plan(self, step: int, holders: Sequence[Holder], limits: Sequence[int]) -> int | None:  # noqa: ARG002
        return self._budget


Planner = BudgetPlanner | ForcedBudget


def new_planner(options: SpeculationOptions) -> Planner | None:
    """None if no step is planned from confidences: none are asked for, or nobody knows what a row costs, which is said
    once."""
    if options.forced_budget is not None:
        return ForcedBudget(options.forced_budget)
    if options.verification is not Verification.FIXED and options.cost is None:
        log.warning("dspark: all drafts are verified, because there is no cost table (whalepod bench verify-cost)")
    if options.verification is not Verification.SCHEDULED or options.cost is None:
        return None
    return BudgetPlanner(
        options.cost, columns=options.draft_tokens, gain_min=options.gain_min, lag_steps=options.lag_steps
    )
