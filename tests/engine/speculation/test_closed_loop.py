"""The published figures of confidence-scheduled verification come out of the scheduler on a synthetic batch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def closed_loop() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "dspark_closed_loop.py"
    spec = importlib.util.spec_from_file_location("dspark_closed_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.closed_loop


def test_at_60_requests_lengths_and_gain_are_the_published_ones(closed_loop: Any) -> None:
    figures = closed_loop(60, steps=2500, seed=0)
    assert 3.2 <= figures.verified <= 4.4
    assert 3.15 <= figures.accepted <= 3.29
    assert 0.04 <= figures.gain <= 0.07


def test_at_16_requests_and_below_all_drafts_are_verified(closed_loop: Any) -> None:
    for requests in (1, 8, 16):
        figures = closed_loop(requests, steps=1000, seed=0)
        assert figures.verified == 5
        assert figures.gain == 0
