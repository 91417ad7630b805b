"""Temperatures that make confidences mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from whalepod.core.errors import ConfigError
from whalepod.engine.speculation.calibration import Calibration, auroc, calibrate, calibration_error


def samples(true_temperatures: list[float], count: int = 20000) -> tuple[np.ndarray, np.ndarray]:
    """Log-odds of a head that is wrong by these factors, and how many drafts stood."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0.8, 1.5, (count, len(true_temperatures)))
    stood = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    return honest * np.array(true_temperatures), stood.cumprod(axis=1).sum(axis=1)


def test_the_temperatures_that_spoilt_the_odds_are_found() -> None:
    wrong = [2.5, 0.5, 1.0, 4.0]
    table = calibrate(*samples(wrong))
    assert table.temperatures == pytest.approx(wrong, rel=0.15)
    assert all(after < 0.02 for after in table.ece_after)
    assert table.ece_before[0] > 3 * table.ece_after[0]
    assert all(0.6 < area < 1 for area in table.auroc)
    assert all(0 < score < 0.25 for score in table.brier)


def test_honest_odds_stay_as_they_are() -> None:
    assert calibrate(*samples([1.0, 1.0])).temperatures == pytest.approx([1, 1], rel=0.13)


def test_the_error_is_the_gap_between_said_and_seen() -> None:
    assert calibration_error(np.full(100, 0.5), np.arange(100) % 2.0) == 0
    assert calibration_error(np.full(100, 0.9), np.arange(100) % 2.0) == pytest.approx(0.4)
    assert calibration_error(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == 0


def test_the_area_counts_pairs_in_the_right_order() -> None:
    assert auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.75)
    assert auroc(np.full(10, 0.3), np.arange(10) % 2.0) == pytest.approx(0.5)
    assert auroc(np.array([0.2, 0.3]), np.ones(2)) == 0.5


def test_a_file_gives_back_the_table_and_mismatches_are_refused(tmp_path: Path) -> None:
    table = calibrate(*samples([1.0, 2.0], count=500), model="ab")
    path = tmp_path / "temperatures.json"
    table.write(path)
    read = Calibration.read(path)
    assert read.to_json() == table.to_json()
    read.check(model="ab", draft_tokens=2)
    with pytest.raises(ConfigError, match="dspark calibrate"):
        read.check(model="ab", draft_tokens=5)
    with pytest.raises(ConfigError, match="weights ab"):
        read.check(model="cd", draft_tokens=2)
    path.write_text(json.dumps({**table.to_json(), "temperatures": [1.0, -1.0]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="above 0"):
        Calibration.read(path)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 100"):
        calibrate(np.zeros((99, 2)), np.zeros(99, np.int64))
