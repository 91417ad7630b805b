"""A whole cluster on virtual time: some tens of seeds before every merge, hundreds at night."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from tests.mutants.planted_bug import ROOT
from tests.simulation.plans import Trouble, plan_run
from tests.simulation.report import figures_of, report_of
from tests.simulation.world import Outcome, run_plan

SEEDS = range(50, 68)
MANY_SEEDS = range(1000, 1400)
SEEDS_A_TEST = 100


@cache
def outcome_of(seed: int) -> Outcome:
    return run_plan(plan_run(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_goes_wrong_every_request_ends_truly_and_nothing_is_left_over(seed: int) -> None:
    outcome = outcome_of(seed)
    if outcome.wrong:
        pytest.fail(report_of(outcome), pytrace=False)


def test_what_can_happen_happens() -> None:
    figures = Counter[str]()
    for seed in SEEDS:
        figures.update(figures_of(outcome_of(seed)))
    wanted = {trouble.value for trouble in Trouble} | {
        *("ok", "hit", "handed_off", "resumed", "cancelled", "deadline_exceeded", "unavailable"),
        *("repeats", "not_stored", "preempted"),
    }
    assert not [what for what in sorted(wanted) if not figures[what]], figures


def test_a_seed_is_a_run() -> None:
    first, second = outcome_of(50), run_plan(plan_run(50))
    assert (first.digest, first.events, first.lines) == (second.digest, second.events, second.lines)
    assert outcome_of(51).digest != first.digest


def test_a_seed_is_the_same_run_in_another_process() -> None:
    played = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", "52"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(played.stdout.splitlines()[-1])["digest"] == outcome_of(52).digest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(MANY_SEEDS.start, MANY_SEEDS.stop, SEEDS_A_TEST))
def test_so_it_is_with_hundreds_of_seeds(first: int) -> None:
    failed = [outcome for seed in range(first, first + SEEDS_A_TEST) if (outcome := run_plan(plan_run(seed))).wrong]
    if failed:
        pytest.fail("\n".join(map(report_of, failed[:3])), pytrace=False)
