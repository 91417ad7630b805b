"""What is said has the target's law, whichever drafts are verified and however they are accepted; and a budget that
looks at the drafts it decides on is caught."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.engine.speculation.toy_model import DRAFTS, PROCESSES, Schedule, answers, chi_square_p, fixed, law, scheduled

SAMPLES = 200_000
P_MIN = 1e-3


def p_value(process: str, schedule: Schedule, *, coupled: bool, seed: int = 0) -> float:
    observed = answers(PROCESSES[process], schedule, coupled=coupled, count=SAMPLES, seed=seed)
    assert observed.sum() == SAMPLES
    return chi_square_p(observed, SAMPLES * law(PROCESSES[process]))


QUICK = {
    ("rejection", "scheduled", "plain"),
    ("rejection", "scheduled", "grammar"),
    ("coupled", "scheduled", "penalties"),
}
PAIRINGS = [
    pytest.param(*pairing, marks=() if pairing in QUICK else pytest.mark.slow)
    for pairing in itertools.product(("rejection", "coupled"), ("fixed", "scheduled"), PROCESSES)
]


@pytest.mark.parametrize(("mode", "schedule", "process"), PAIRINGS)
def test_answers_have_the_targets_law(mode: str, schedule: str, process: str) -> None:
    chosen = fixed(2) if schedule == "fixed" else scheduled(2)
    assert p_value(process, chosen, coupled=mode == "coupled") > P_MIN


def test_a_budget_from_the_step_itself_is_seen() -> None:
    assert p_value("plain", scheduled(0), coupled=False) < P_MIN


def test_coupled_answers_may_use_a_budget_from_the_step_itself() -> None:
    assert p_value("plain", scheduled(0), coupled=True) > P_MIN


def test_coupled_answers_are_the_same_for_every_schedule() -> None:
    for process in PROCESSES.values():
        said = [
            answers(process, schedule, coupled=True, count=2000).tolist()
            for schedule in (fixed(0), fixed(1), fixed(DRAFTS), scheduled(2), scheduled(0))
        ]
        assert all(other == said[0] for other in said)


def test_the_law_is_a_law() -> None:
    for process in PROCESSES.values():
        assert np.isclose(law(process).sum(), 1)
