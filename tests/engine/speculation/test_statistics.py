"""Counts that reconcile, and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest

from whalepod.engine.speculation.statistics import SpeculationCounts, SpeculationWork, VerifiedRequest, add_up

SURVIVAL = np.array([0.9, 0.5, 0.1])


def request(drafted: int, verified: int, accepted: int) -> VerifiedRequest:
    return VerifiedRequest(drafted, verified, accepted, np.zeros(3), SURVIVAL)


WORKS = [
    SpeculationWork((request(3, 3, 1), request(3, 2, 2)), budget=5, draft_seconds=0.5),
    SpeculationWork((request(1, 1, 0),), budget=None, draft_seconds=0.25),
]


def test_what_is_emitted_is_what_stood_and_one_for_each_request() -> None:
    counts = add_up(3, WORKS)
    assert (counts.steps, counts.trimmed_steps, counts.request_steps) == (2, 1, 3)
    assert counts.emitted == counts.request_steps + counts.accepted.sum() == 6
    assert counts.drafted.tolist() == [3, 2, 2]
    assert counts.verified.tolist() == [3, 2, 1]
    assert counts.accepted.tolist() == [2, 1, 0]
    assert counts.draft_seconds == 0.75


def test_lengths_and_rates_are_those_of_the_published_figures() -> None:
    counts = add_up(3, WORKS)
    assert counts.verified_length == pytest.approx(6 / 3)
    assert counts.accepted_length == pytest.approx(6 / 3)
    assert counts.useful_fraction == pytest.approx(3 / 6)
    # Of a draft behind one that fell nothing is known.
    assert counts.acceptance == pytest.approx([2 / 3, 1 / 2, 0])


def test_the_confidence_error_is_of_verified_drafts() -> None:
    error = add_up(3, WORKS).calibration_error
    assert error == pytest.approx([abs(3 * 0.9 - 2) / 3, abs(2 * 0.5 - 1) / 2, 0.1])


def test_nothing_counted_gives_zeros_and_not_errors() -> None:
    counts = SpeculationCounts(2)
    assert (counts.verified_length, counts.accepted_length, counts.useful_fraction) == (0, 0, 0)
    assert list(counts.acceptance) == [0, 0]
