"""Drafts change no token: with and without, many or few verified, alone or among others, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.engine.test_pipeline import compare_lives, live
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.options import Acceptance, SpeculationOptions, Verification

COUPLED = SpeculationOptions(draft_tokens=4, acceptance=Acceptance.COUPLED)
COST = CostTable(bias=5.0, requests=[(1, 0.0)], rows=[(1, 0.0), (8, 1.0), (9, 3.0), (60, 30.0)], draft=[(1, 0.5)])


QUICK = (0, 7, 13, 24)


def ways() -> Iterator[tuple[str, SpeculationOptions]]:
    """Numbers of drafts, and ways to choose how many of them are verified."""
    for drafts in range(1, 5):
        yield f"{drafts} drafts", replace(COUPLED, draft_tokens=drafts)
    for verification in (Verification.SCHEDULED, Verification.EARLY_STOP):
        yield verification.value, replace(COUPLED, verification=verification, cost=COST, gain_min=0.0)


@pytest.mark.parametrize(("label", "speculation"), [pytest.param(*way, id=way[0]) for way in ways()])
def test_random_lives_say_the_same_with_drafts(label: str, speculation: SpeculationOptions) -> None:
    _compare(label, speculation, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("label", "speculation"), [pytest.param(*way, id=way[0]) for way in ways()])
def test_many_random_lives_say_the_same_with_drafts(label: str, speculation: SpeculationOptions) -> None:
    _compare(label, speculation, range(100, 220))


def _compare(label: str, speculation: SpeculationOptions, seeds: Sequence[int]) -> None:
    accepted = preempted = 0
    for seed in seeds:
        without = live(seed, ahead=False, answer_tokens=80)
        for ahead in (False, True):
            life = live(seed, ahead=ahead, speculation=speculation, answer_tokens=80)
            compare_lives(life, without, f"{label}, seed {seed}, ahead {ahead}")
            accepted += life.accepted
            preempted += life.preempted
    assert accepted > 100
    assert preempted > 0
