"""Sequential temperature scaling: makes the confidence head's odds mean what they say (`runtime.md` §2.9).

For draft k in order a temperature is chosen so that the product of the confidences up to k predicts how often k and all
before it were accepted; the temperatures before it stay. Labels must come from verifying all drafts: a draft that was
not verified says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import ConfigError

from .cost_table import read_table

SCHEMA: Final = "whalepod.dspark.temperatures/1"
TEMPERATURES: Final = np.logspace(-1, 1, 41)
BINS: Final = 15
SAMPLES_MIN: Final = 100

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """One value for each drafted token."""

    temperatures: Sequence[float]
    samples: int
    ece_before: Sequence[float]
    ece_after: Sequence[float]
    auroc: Sequence[float]
    """Of the calibrated survival: chance that an accepted draft had more than a rejected one. 0.5 if all are alike."""
    brier: Sequence[float]
    model: str = ""
    """Fingerprint of the weights, as hex."""

    def check(self, *, model: str, draft_tokens: int) -> None:
        """Raises ConfigError if it is for other weights or another number of drafts."""
        if len(self.temperatures) != draft_tokens:
            raise ConfigError(
                f"the temperature table is for {len(self.temperatures)} drafts, but dspark.draft_tokens is "
                f"{draft_tokens}: calibrate again (whalepod dspark calibrate)"
            )
        if self.model and self.model != model:
            raise ConfigError(f"the temperature table is of weights {self.model[:12]}, these are {model[:12]}")

    def to_json(self) -> Mapping[str, object]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "temperatures": list(self.temperatures),
            "num_samples": self.samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            "auroc": list(self.auroc),
            "brier": list(self.brier),
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises ConfigError, naming the file, if it is not such a table."""
        values = read_table(path, schema=SCHEMA)
        try:
            table = cls(
                temperatures=[float(value) for value in values["temperatures"]],
                samples=int(values["num_samples"]),
                ece_before=[float(value) for value in values["ece_before"]],
                ece_after=[float(value) for value in values["ece_after"]],
                auroc=[float(value) for value in values["auroc"]],
                brier=[float(value) for value in values["brier"]],
                model=str(values["model"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a temperature table: {type(error).__name__} {error}") from None
        if not table.temperatures or min(table.temperatures) <= 0:
            raise ConfigError(f"{path} needs temperatures above 0, not {list(table.temperatures)}")
        return table


def calibrate(log_odds: Floats, accepted: NDArray[np.int64], *, model: str = "") -> Calibration:
    """log_odds [samples, drafts], uncalibrated; accepted [samples]: how many leading drafts stood, all verified.

    Raises ConfigError if there are too few samples to say anything.
    """
    if len(log_odds) < SAMPLES_MIN:
        raise ConfigError(f"calibration needs at least {SAMPLES_MIN} fully verified steps, not {len(log_odds)}")
    labels = (accepted[:, None] > np.arange(log_odds.shape[1])).astype(np.float64)
    before = np.cumprod(_sigmoid(log_odds), axis=1)
    survival = np.ones(len(log_odds))
    temperatures: list[float] = []
    after: list[Floats] = []
    for draft in range(log_odds.shape[1]):
        candidates = [survival * _sigmoid(log_odds[:, draft] / temperature) for temperature in TEMPERATURES]
        errors = [calibration_error(candidate, labels[:, draft]) for candidate in candidates]
        best = int(np.argmin(errors))
        temperatures.append(float(TEMPERATURES[best]))
        survival = candidates[best]
        after.append(survival)
    columns = range(log_odds.shape[1])
    return Calibration(
        temperatures=temperatures,
        samples=len(log_odds),
        ece_before=[calibration_error(before[:, draft], labels[:, draft]) for draft in columns],
        ece_after=[calibration_error(after[draft], labels[:, draft]) for draft in columns],
        auroc=[auroc(after[draft], labels[:, draft]) for draft in columns],
        brier=[float(np.mean((after[draft] - labels[:, draft]) ** 2)) for draft in columns],
        model=model,
    )


def calibration_error(predicted: Floats, happened: Floats) -> float:
    """Expected calibration error over 15 bins of equal width."""
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, predicted, BINS) - np.bincount(bins, happened, BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def auroc(predicted: Floats, happened: Floats) -> float:
    """Area under the ROC curve; 0.5 if everything happened, or nothing. Equal predictions share their rank."""
    positives = int(happened.sum())
    negatives = len(happened) - positives
    if not positives or not negatives:
        return 0.5
    values, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    assert len(values) == len(counts)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][happened > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -500, 500)))
