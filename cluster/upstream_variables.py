"""Variables of the published engine: some name one of our settings, others say what holds here anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from whalepod.core.errors import ConfigError

NAMES: Final[Mapping[str, str]] = {
    "DEEPINFER_HF_MODEL_DIR": "model",
    "DEEPINFER_ASYNC_SCHEDULING": "engine.async_scheduling",
}
"""Variable -> key of the setting that it names."""

BATCH_INVARIANT: Final = "DEEPINFER_BATCH_INVARIANT"
"""1: every request is `exact` unless it says otherwise."""

FIXED: Final[Mapping[str, tuple[str, str]]] = {
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": ("compact", "upper layers run on the kept rows only"),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": ("140", "the kept rows are the model's: window and two drafts"),
}
"""Variable -> the value that holds whatever is set, and why."""


def upstream_values(variables: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(key of a setting, variable, text) for every variable that sets one.

    Raises ConfigError on a value that cannot be had, and if two variables contradict each other; it names them.
    """
    for variable, (value, reason) in FIXED.items():
        if variables.get(variable, "") not in ("", value):
            raise ConfigError(f"{variable} can only be {value} here, not {variables[variable]!r}: {reason}")
    for variable, key in NAMES.items():
        if variable in variables:
            yield key, variable, variables[variable]
    wanted = variables.get(BATCH_INVARIANT, "")
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"{BATCH_INVARIANT} must be 0 or 1, not {wanted!r}")
    if wanted == "1":
        yield "fidelity.default", BATCH_INVARIANT, "exact"


def check_upstream(variables: Mapping[str, str], *, default_fidelity: str, set_by: str | None) -> None:
    """Raises ConfigError if what was asked for under an upstream name was unsaid under one of ours."""
    if variables.get(BATCH_INVARIANT) == "1" and default_fidelity != "exact":
        raise ConfigError(
            f"{BATCH_INVARIANT}=1 and {set_by or 'fidelity.default'}={default_fidelity} contradict each other"
        )
