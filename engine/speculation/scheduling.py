"""How many drafts of each request are verified (`runtime.md` §2.2 – 2.5). Arithmetic only.

The value of verifying draft k of a request is the probability that it and all before it are accepted, its *survival*.
Survivals fall along a request, so the best slots of a batch are always the first drafts of each.

The total is decided from survivals of an earlier step, or by early stopping: a total that looked at what this step's
drafts are worth would know something about a draft before deciding whether to verify it, and that changes the law of
what is emitted. Who gets the slots is decided from this step's survivals.

Arrays may have leading dimensions: one batch each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .cost_table import CostTable

Survivals: TypeAlias = NDArray[np.floating[Any]]
"""[…, requests, columns]: what verifying a draft is worth; 0 where a request may not verify one."""
Counts: TypeAlias = NDArray[np.int64]

SURVIVAL_MIN = 1e-6
"""A slot that is worth less is never worth a row."""


def survivals(log_odds: NDArray[np.floating], temperatures: NDArray[np.floating], limits: Counts) -> Survivals:
    """log_odds […, requests, columns] of each draft, given those before it; temperatures [columns] (1: uncalibrated);
    limits […, requests]: drafts that a request may verify."""
    scaled = np.asarray(log_odds, np.float64) / temperatures
    confidence = 1 / (1 + np.exp(-np.clip(scaled, -500, 500)))
    columns = np.arange(scaled.shape[-1])
    return np.where(columns < limits[..., None], confidence, 0.0).cumprod(axis=-1, dtype=np.float64)


def best_budget(survival: Survivals, cost: CostTable) -> tuple[Counts, NDArray[np.float64]]:
    """[…] drafts that a step of these requests should verify together, the B that yields most tokens a second; and how
    many times as many that is as if all slots that are worth a row were verified."""
    values, rates = _rates(survival, cost)
    best = rates.argmax(axis=-1)
    every = (values > 0).sum(axis=-1)
    at_best, at_every = (np.take_along_axis(rates, index[..., None], axis=-1)[..., 0] for index in (best, every))
    return best, at_best / at_every


def stop_early(survival: Survivals, cost: CostTable) -> Counts:
    """[…] the budget up to which every further slot, from the most valuable on, yielded more tokens a second.

    Lawful with survivals of the step itself, because it never looks past the slot that it decides on. It does not pass
    a stair of the cost that the global optimum would.
    """
    _, rates = _rates(survival, cost)
    falls = rates[..., 1:] <= rates[..., :-1]
    return np.where(falls.any(axis=-1), falls.argmax(axis=-1), falls.shape[-1])


def allot(survival: Survivals, budget: Counts | int) -> Counts:
    """[…, requests] drafts that each request verifies: the `budget` most valuable slots of the batch.

    Ties go to the earlier column, then to the earlier request; no token is looked at.
    """
    requests, columns = survival.shape[-2:]
    flat = survival.reshape(*survival.shape[:-2], requests * columns)
    column = np.broadcast_to(np.arange(requests * columns) % columns, flat.shape)
    order = np.lexsort((column, -flat), axis=-1)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(requests * columns), order.shape), axis=-1)
    admitted = (rank < np.asarray(budget)[..., None]) & (flat > 0)
    return admitted.reshape(survival.shape).sum(axis=-1)


def _rates(survival: Survivals, cost: CostTable) -> tuple[Survivals, NDArray[np.float64]]:
    """Slots worth a row, best first, then zeros; and the tokens a second of verifying the first 0, 1, 2 … of them,
    −inf past the last."""
    requests = survival.shape[-2]
    flat = np.where(survival >= SURVIVAL_MIN, survival, 0.0).reshape(*survival.shape[:-2], -1)
    values = -np.sort(-flat, axis=-1)
    zero = np.zeros((*values.shape[:-1], 1))
    tokens = requests + np.concatenate((zero, np.cumsum(values, axis=-1)), axis=-1)
    rate = tokens / cost.step_seconds(requests, requests + np.arange(tokens.shape[-1]))
    there = np.concatenate((zero == 0, values > 0), axis=-1)
    return values, np.where(there, rate, -np.inf)
