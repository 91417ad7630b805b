"""Settings of DSpark: one section of `ClusterConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from whalepod.engine.speculation.options import (
    Acceptance,
    DraftSampling,
    SpeculationOptions,
    Verification,
    drafts_calibrated,
    speculation_for,
)
from whalepod.model.config import ModelConfig


class DsparkSettings(BaseModel):
    """Drafts on decode ranks. They change no law of what is said, and no token of greedy and seeded requests."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    draft_tokens: int | None = Field(
        default=None,
        ge=0,
        description="drafts of a request in a step; 0: none; default: what the model can draft, "
        "on a CPU as many as the model's own calibration is for",
    )
    verification: Verification = Field(
        default=Verification.FIXED,
        description="how many drafts are verified: fixed (all), scheduled (what pays, by cost_table)",
    )
    acceptance: Acceptance = Field(
        default=Acceptance.AUTO,
        description="what makes a draft stand: rejection, coupled, auto (coupled for seeded and exact requests)",
    )
    draft_sampling: DraftSampling = Field(
        default=DraftSampling.SAMPLE, description="how drafts are chosen above temperature 0: sample, greedy"
    )
    cost_table: Path | None = Field(
        default=None, description="what steps cost, from `whalepod bench verify-cost`; unset: all drafts are verified"
    )
    temperature_table: Path | None = Field(
        default=None,
        description="calibration of confidences, from `whalepod dspark calibrate`; unset: the model's own, if any",
    )
    budget_lag: int = Field(
        default=2, ge=1, description="scheduled: age in steps of the confidences that a step is planned from"
    )
    gain_min: float = Field(default=0.02, ge=0, description="verify all drafts where trimming gains less than this")
    simulate_acceptance: float | None = Field(
        default=None, ge=0, le=1, description="FOR MEASURING ONLY: chance that a draft stands; answers become nonsense"
    )

    @field_validator("verification")
    @classmethod
    def _offered(cls, verification: Verification) -> Verification:
        if verification is Verification.EARLY_STOP:
            raise ValueError("early_stop is for offline engines only: use fixed or scheduled")
        return verification

    @model_validator(mode="after")
    def _drafts_if_anything_is_said_of_them(self) -> Self:
        for name, is_said in self._said().items():
            if is_said and self.draft_tokens == 0:
                raise ValueError(f"dspark.{name} is set, but dspark.draft_tokens is 0: nothing is drafted")
        return self

    def _said(self) -> dict[str, bool]:
        """Which settings make sense with drafts only, and are set."""
        return {
            "verification": self.verification is not Verification.FIXED,
            "cost_table": self.cost_table is not None,
            "temperature_table": self.temperature_table is not None,
            "simulate_acceptance": self.simulate_acceptance is not None,
        }

    def options(
        self, model: ModelConfig, *, directory: Path | None = None, device: str = "cpu"
    ) -> SpeculationOptions | None:
        """For a rank of this model, which lies in `directory`; None: it does not draft. Reads the tables. Raises
        ConfigError.

        On a CPU rows are dear: drafts that nobody has measured are not made unless they are asked for.
        """
        drafts = self.draft_tokens
        if drafts is None and device == "cpu" and not any(self._said().values()):
            drafts = drafts_calibrated(directory)
        wanted = SpeculationOptions(
            verification=self.verification,
            acceptance=self.acceptance,
            draft_sampling=self.draft_sampling,
            gain_min=self.gain_min,
            lag_steps=self.budget_lag,
            simulated_acceptance=self.simulate_acceptance,
        )
        return speculation_for(
            model,
            wanted,
            draft_tokens=drafts,
            cost_table=self.cost_table,
            temperature_table=self.temperature_table,
            directory=directory,
        )
