"""What top-k, top-p and min-p leave of a row."""

from __future__ import annotations

import numpy as np
import pytest

from whalepod.engine.truncation import best_ranks, ids_of, ranks_of, truncate


def _kept(weights: list[float], *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    row = np.array([weights], np.float32)
    truncate(row, top_k=np.array([top_k]), top_p=np.array([top_p]), min_p=np.array([min_p]))
    kept = np.flatnonzero(np.isfinite(row[0]))
    assert (row[0, kept] == np.array(weights, np.float32)[kept]).all()
    return kept.tolist()


SHARES = list(np.log([0.1, 0.4, 0.3, 0.2]))


def test_top_k_keeps_exactly_k_and_prefers_low_ids_at_the_border() -> None:
    assert _kept([1, 3, 2, 2, 2], top_k=3) == [1, 2, 3]
    assert _kept([-0.0, 0.0, -1.0, 0.0], top_k=2) == [0, 1]


@pytest.mark.parametrize("top_k", [-1, 0, 5, 9])
def test_top_k_is_off_below_one_and_from_the_vocabulary_on(top_k: int) -> None:
    assert _kept([1, 3, 2, 2, 2], top_k=top_k) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert _kept(SHARES, top_p=0.69) == [1, 2]
    assert _kept(SHARES, top_p=0.71) == [1, 2, 3]
    assert _kept(SHARES, top_p=1e-9) == [1]


def test_top_p_is_of_what_top_k_left() -> None:
    # Of {0.4, 0.3}, the first has 0.57: enough for 0.5, where of all it would not be.
    assert _kept(SHARES, top_k=2, top_p=0.5) == [1]


def test_min_p_is_relative_to_the_best_that_is_left() -> None:
    assert _kept(SHARES, min_p=0.6) == [1, 2]
    assert _kept(SHARES, min_p=1.0) == [1]


def test_each_row_has_rules_of_its_own() -> None:
    rows = np.array([SHARES] * 4, np.float32)
    truncate(
        rows,
        top_k=np.array([1, -1, 3, -1]),
        top_p=np.array([1, 0.69, 0.5, 1.0]),
        min_p=np.array([0, 0, 0, 0.0]),
    )
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in rows] == [[1], [1, 2], [1, 2], [0, 1, 2, 3]]


def test_ranks_follow_value_then_id() -> None:
    weights = np.array([[2, 5, 2, -np.inf, 5, -3, -0.0, 0.0, 1e-40, -1e-40]], np.float32)
    order = [1, 4, 0, 2, 8, 6, 7, 9, 5, 3]
    for count in (1, 4, 10, 12):
        assert ids_of(best_ranks(ranks_of(weights), count)).tolist() == [order[:count]]
