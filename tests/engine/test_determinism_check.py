"""The check of determinism itself: it meets what it is to meet, it passes, and it can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.engine.engine_world import tiny_model
from whalepod.engine import determinism
from whalepod.engine.determinism import (
    DeterminismPlan,
    DeterminismReport,
    LeakyRunner,
    check_determinism,
    make_cases,
    make_schedule,
)

QUICK = DeterminismPlan(schedules=3, requests=4, answer_tokens=5)


@pytest.fixture(scope="module")
def report() -> DeterminismReport:
    return check_determinism(tiny_model(), QUICK)


def test_random_schedules_change_nothing(report: DeterminismReport) -> None:
    assert (report.schedules, report.different, report.details) == (3, 0, [])
    assert report.passed


def test_the_schedules_drop_and_preempt(report: DeterminismReport) -> None:
    assert report.dropped > 0
    assert report.preempted > 0


def test_the_controls_show_that_it_can_fail(report: DeterminismReport) -> None:
    assert report.control_seen
    assert report.seed_changed_own
    assert report.seed_changed_others == 0


def test_logits_that_depend_on_their_neighbours_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = determinism.run_schedule

    def leaky(*arguments: Any, instrument: Any = None) -> Any:
        return run(*arguments, instrument=instrument or LeakyRunner)

    monkeypatch.setattr(determinism, "run_schedule", leaky)
    report = check_determinism(tiny_model(), DeterminismPlan(schedules=1, requests=3, answer_tokens=3))
    assert report.different > 0
    assert len(report.details) == report.different
    assert not report.passed


def test_a_check_whose_controls_saw_nothing_has_not_passed() -> None:
    good = DeterminismReport(schedules=1, control_seen=True, seed_changed_own=True)
    assert good.passed
    assert not replace(good, schedules=0).passed
    assert not replace(good, control_seen=False).passed
    assert not replace(good, seed_changed_own=False).passed
    assert not replace(good, seed_changed_others=1).passed


def test_a_row_alone_is_left_as_it_is_by_the_control() -> None:
    class One:
        def run(self, rows: Sequence[object]) -> list[Any]:
            return [np.ones((1, 4), np.float32) for _ in rows]

        def draft(self, anchors: object, choose: object, tokens: int) -> Any:
            raise AssertionError("nothing is drafted here")

    (alone,) = LeakyRunner(One()).run([None])  # type: ignore[list-item]
    beside = LeakyRunner(One()).run([None, None])[0]  # type: ignore[list-item]
    assert alone is not None
    assert beside is not None
    assert (alone == 1).all()
    assert (beside != 1).all()


def test_the_same_seed_makes_the_same_schedules() -> None:
    def made(seed: int) -> object:
        rng = Random(seed)
        cases = make_cases(tiny_model(), QUICK, rng)
        return cases, make_schedule(tiny_model(), QUICK, cases, rng)

    assert made(5) == made(5)
    assert made(5) != made(6)
