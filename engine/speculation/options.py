"""How a rank speculates. Checked against the model before anything starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from whalepod.core.errors import ConfigError
from whalepod.engine.interface import EngineRequest, Fidelity
from whalepod.model.config import ModelConfig

from .calibration import Calibration
from .cost_table import CostTable

TEMPERATURES_FILE: Final = "dspark_temperatures.json"
"""In a model's directory: the temperature table that is taken if none is named."""

log = logging.getLogger(__name__)


class Verification(Enum):
    """How many drafts are verified."""

    FIXED = "fixed"
    """All of them."""
    SCHEDULED = "scheduled"
    """As many as pay, by confidences of an earlier step."""
    EARLY_STOP = "early_stop"
    """As many as pay, by confidences of the step itself, up to the first that does not."""


class Acceptance(Enum):
    """What makes a draft stand."""

    AUTO = "auto"
    """Coupled for seeded requests and those of fidelity `exact`, which get the same tokens with drafts and without;
    rejection for others."""
    REJECTION = "rejection"
    COUPLED = "coupled"


class DraftSampling(Enum):
    """How drafts are chosen at a temperature above 0."""

    SAMPLE = "sample"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Raises ConfigError, naming the setting, on values that cannot work."""

    draft_tokens: int = 5
    """Drafts of a request in a step, at most."""
    verification: Verification = Verification.FIXED
    acceptance: Acceptance = Acceptance.AUTO
    draft_sampling: DraftSampling = DraftSampling.SAMPLE
    cost: CostTable | None = None
    """None: all drafts are verified, because nobody knows what a row costs."""
    calibration: Calibration | None = None
    gain_min: float = 0.02
    """Trimming that gains less is left alone."""
    lag_steps: int = 2
    """Age of the confidences that a step's budget is planned from."""
    forced_budget: int | None = None
    """For measuring: drafts that a step verifies together, instead of those that pay."""
    simulated_acceptance: float | None = None
    """For measuring: the chance that a draft stands, whatever it is. Answers are nonsense."""

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"dspark.draft_tokens must be at least 1 here, not {self.draft_tokens}")
        if self.lag_steps < 1:
            raise ConfigError(
                f"dspark.budget_lag must be at least 1, not {self.lag_steps}: a budget that looks at the drafts it "
                f"decides on changes what is said"
            )
        if self.gain_min < 0:
            raise ConfigError(f"dspark.gain_min must be at least 0, not {self.gain_min}")
        if self.simulated_acceptance is not None and not 0 <= self.simulated_acceptance <= 1:
            raise ConfigError(f"dspark.simulate_acceptance must be in [0, 1], not {self.simulated_acceptance}")

    def couples(self, request: EngineRequest) -> bool:
        """Its drafts are judged by coupling: what it says does not depend on them, nor on how many are verified."""
        if request.sampling.greedy or self.acceptance is Acceptance.COUPLED:
            return True
        promised = request.sampling.seed is not None or request.fidelity is Fidelity.EXACT
        return self.acceptance is Acceptance.AUTO and promised

    def trims(self, request: EngineRequest) -> bool:
        """How many of its drafts are verified may follow from other requests. Without coupling, that would change which
        of the equally good answers it gets, and a seeded request of fidelity `exact` was promised one."""
        promised = request.fidelity is Fidelity.EXACT and request.sampling.seed is not None
        return self.couples(request) or not promised

    def check(self, config: ModelConfig, *, weights: str, slots: int) -> None:
        """Raises ConfigError if this model cannot speculate like this. `weights`: their fingerprint, as hex."""
        if not config.num_nextn_predict_layers:
            raise ConfigError("dspark.draft_tokens is above 0, but this checkpoint has no draft blocks")
        if self.draft_tokens > config.dspark_block_size:
            raise ConfigError(
                f"dspark.draft_tokens is {self.draft_tokens}, but this model drafts {config.dspark_block_size} at most"
            )
        if self.verification is not Verification.FIXED and not config.enable_confidence_head:
            raise ConfigError(
                f"dspark.verification is {self.verification.value}, but this checkpoint has no confidence head"
            )
        if self.calibration is not None:
            self.calibration.check(model=weights, draft_tokens=self.draft_tokens)
        if self.cost is not None:
            self.cost.check(model=weights, draft_tokens=self.draft_tokens, requests_max=slots)


def speculation_for(
    model: ModelConfig,
    wanted: SpeculationOptions,
    *,
    draft_tokens: int | None,
    cost_table: Path | None,
    temperature_table: Path | None,
    directory: Path | None = None,
) -> SpeculationOptions | None:
    """`wanted` for this model, with so many drafts and these tables; None: it does not draft. `draft_tokens` None: as
    many as the model can. `temperature_table` None: the one in the model's `directory`, if it is for so many drafts.
    Raises ConfigError."""
    able = model.dspark_block_size if model.num_nextn_predict_layers else 0
    drafts = able if draft_tokens is None else draft_tokens
    if not drafts:
        return None
    if wanted.simulated_acceptance is not None:
        log.warning(
            "dspark.simulate_acceptance is %s: drafts stand by coin, and WHAT THIS RANK SAYS IS NONSENSE",
            wanted.simulated_acceptance,
        )
    return replace(
        wanted,
        draft_tokens=drafts,
        cost=None if cost_table is None else CostTable.read(cost_table),
        calibration=_calibration(temperature_table, directory, drafts),
    )


def drafts_calibrated(directory: Path | None) -> int:
    """How many drafts the temperature table in a model's `directory` is for; 0: there is none. Raises ConfigError."""
    table = None if directory is None else directory / TEMPERATURES_FILE
    return len(Calibration.read(table).temperatures) if table is not None and table.exists() else 0


def _calibration(named: Path | None, directory: Path | None, drafts: int) -> Calibration | None:
    if named is not None:
        return Calibration.read(named)
    beside = None if directory is None else directory / TEMPERATURES_FILE
    if beside is None or not beside.exists():
        return None
    found = Calibration.read(beside)
    return found if len(found.temperatures) == drafts else None
