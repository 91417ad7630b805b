"""What speculation did, per step and added up (`runtime.md` §2.10). Verified counts drafts only; what is emitted
includes the token behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .calibration import BINS

Floats = NDArray[np.floating[Any]]


class VerifiedRequest(NamedTuple):
    """One request in one step. `accepted` drafts stood, before a stop cut the answer short."""

    drafted: int
    verified: int
    accepted: int
    log_odds: Floats | None
    """[columns], uncalibrated. None: the checkpoint has no confidence head."""
    survival: Floats | None
    """[columns], calibrated; 0 past `drafted`."""


@dataclass(frozen=True, slots=True)
class SpeculationWork:
    """One step."""

    requests: tuple[VerifiedRequest, ...]
    budget: int | None
    """Drafts that it was to verify; None: all."""
    draft_seconds: float


@dataclass(slots=True)
class SpeculationCounts:
    """Sums over steps. Lists are by column."""

    columns: int
    steps: int = 0
    trimmed_steps: int = 0
    """With fewer drafts verified than there were."""
    request_steps: int = 0
    emitted: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    drafted: Floats = field(init=False)
    verified: Floats = field(init=False)
    tried: Floats = field(init=False)
    """Verified, and all before them stood."""
    accepted: Floats = field(init=False)
    confidence: Floats = field(init=False)
    """Sum of survivals of verified drafts."""
    bins: Floats = field(init=False)
    """[columns, bins, 3]: of verified drafts, how many there were, the sum of their survivals, how many stood."""

    def __post_init__(self) -> None:
        self.drafted, self.verified, self.tried, self.accepted, self.confidence = np.zeros((5, self.columns))
        self.bins = np.zeros((self.columns, BINS, 3))

    def add(self, work: SpeculationWork, *, seconds: float = 0.0) -> None:
        self.steps += 1
        self.trimmed_steps += any(request.verified < request.drafted for request in work.requests)
        self.seconds += seconds
        self.draft_seconds += work.draft_seconds
        column = np.arange(self.columns)
        for request in work.requests:
            self.request_steps += 1
            self.emitted += request.accepted + 1
            self.drafted += column < request.drafted
            self.verified += column < request.verified
            self.tried += (column < request.verified) & (column <= request.accepted)
            self.accepted += column < request.accepted
            if request.survival is not None:
                seen = column[: request.verified]
                survival = request.survival[: request.verified]
                self.confidence[seen] += survival
                place = np.minimum((survival * BINS).astype(np.int64), BINS - 1)
                stood = seen < request.accepted
                self.bins[seen, place] += np.stack((np.ones(len(seen)), survival, stood), axis=1)

    @property
    def verified_length(self) -> float:
        """Drafts verified by a request in a step."""
        return float(self.verified.sum()) / max(1, self.request_steps)

    @property
    def accepted_length(self) -> float:
        """Tokens emitted by a request in a step."""
        return self.emitted / max(1, self.request_steps)

    @property
    def useful_fraction(self) -> float:
        """Of the verified drafts, those that stood."""
        return float(self.accepted.sum() / max(1.0, self.verified.sum()))

    @property
    def acceptance(self) -> Sequence[float]:
        """Chance that a verified draft stands if those before it do, by column."""
        return (self.accepted / np.maximum(self.tried, 1)).tolist()

    @property
    def calibration_error(self) -> Sequence[float]:
        """Of survivals against what stood, by column."""
        gaps = np.abs(self.bins[..., 1] - self.bins[..., 2]).sum(axis=1)
        return (gaps / np.maximum(self.verified, 1)).tolist()

    def figures(self) -> Mapping[str, object]:
        return {
            "steps": self.steps,
            "trimmed_steps": self.trimmed_steps,
            "request_steps": self.request_steps,
            "verified_length": round(self.verified_length, 4),
            "accepted_length": round(self.accepted_length, 4),
            "useful_fraction": round(self.useful_fraction, 4),
            "acceptance": [round(value, 4) for value in self.acceptance],
            "calibration_error": [round(value, 4) for value in self.calibration_error],
        }


def add_up(columns: int, works: Iterable[SpeculationWork]) -> SpeculationCounts:
    counts = SpeculationCounts(columns)
    for work in works:
        counts.add(work)
    return counts
