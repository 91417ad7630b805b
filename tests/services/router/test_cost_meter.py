"""Costs are averages of what was measured, and unknown before."""

from __future__ import annotations

import pytest

from whalepod.services.router.cost_meter import CostMeter
from whalepod.services.router.placement import Costs


def test_nothing_is_known_before_it_was_measured() -> None:
    assert CostMeter().costs == Costs(None, None, 0.0)
    assert CostMeter().prompt_s(1000) is None


def test_costs_follow_the_samples_and_short_prompts_are_no_sample() -> None:
    meter = CostMeter()
    meter.note_remote(5.0, tokens=2)
    assert meter.costs.remote_s_per_token is None
    meter.note_remote(1.0, tokens=1000)
    assert meter.prompt_s(500) == pytest.approx(0.5)
    for _ in range(60):
        meter.note_remote(2.0, tokens=1000)
        meter.note_local(4.0, tokens=1000)
        meter.note_handoff(0.1)
    assert meter.costs.remote_s_per_token == pytest.approx(0.002, rel=0.01)
    assert meter.costs.local_s_per_token == pytest.approx(0.004)
    assert meter.costs.handoff_s == pytest.approx(0.1)
