"""Which drafts stand, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from whalepod.engine.speculation.acceptance import count_leading, passes, residual


def test_a_draft_stands_with_the_ratio_of_the_laws() -> None:
    p, q = np.array([0.3, 0.3, 0.0, 0.9]), np.array([0.6, 0.6, 0.2, 0.1])
    assert passes(p, q, np.array([0.49, 0.51, 1e-9, 0.99])).tolist() == [True, False, False, True]


def test_a_draft_that_could_not_be_drawn_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="could not"):
        passes(np.array([0.5]), np.array([0.0]), np.array([0.5]))


def test_only_the_leading_drafts_of_each_request_count() -> None:
    # Requests of 3, 1 and 3 rows; the last row of each judges nothing.
    stands = np.array([True, True, False, False, False, True, False])
    assert count_leading(stands, np.array([0, 3, 4])).tolist() == [2, 0, 0]
    assert count_leading(np.zeros(0, bool), np.zeros(0, np.int64)).tolist() == []


def test_the_residual_has_what_the_draft_had_too_little_of() -> None:
    p, q = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), np.array([[0.2, 0.7, 0.1], [0.2, 0.3, 0.5]])
    assert residual(p, q) == pytest.approx(np.array([[0.3, 0, 0], [0.2, 0.3, 0.5]]))


def test_a_certain_draft_leaves_everything_but_itself() -> None:
    certain = np.array([[0.0, 1.0, 0.0]])
    assert residual(np.array([[0.5, 0.2, 0.3]]), certain) == pytest.approx(np.array([[0.5, 0, 0.3]]))
