"""Variables of the published engine: some name one of our settings, some ask for a fidelity, others say what holds here
anyway or cannot be had. `docs/configuration.md` lists them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from .errors import ConfigError

PREFIX: Final = "DEEPINFER_"

SETTINGS: Final[Mapping[str, str]] = {
    "DEEPINFER_HF_MODEL_DIR": "model",
    "DEEPINFER_ASYNC_SCHEDULING": "engine.async_scheduling",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "engine.kept_rows",
    "DEEPINFER_MAX_NUM_SEQS": "decode.slots",
    "DEEPINFER_MAX_BATCHED_TOKENS": "prefill.chunk_tokens",
    "DEEPINFER_USE_NEXTN_DECODE": "dspark.draft_tokens",
    "DEEPINFER_SPEC_SAMPLING": "dspark.acceptance",
    "DEEPINFER_DRAFT_SAMPLING": "dspark.draft_sampling",
    "DEEPINFER_DSPARK_COST_TABLE": "dspark.cost_table",
    "DEEPINFER_DSPARK_STS_TABLE": "dspark.temperature_table",
    "DEEPINFER_DSPARK_BUDGET_LAG": "dspark.budget_lag",
    "DEEPINFER_EPLB_WINDOW": "eplb.window_steps",
    "DEEPINFER_EPLB_INTERVAL": "eplb.interval_steps",
    "DEEPINFER_EPLB_REDUNDANT": "decode.redundant_experts",
}
"""Variable -> key of the setting that it names."""

ACCELERATOR: Final = "DEEPINFER_ACCELERATOR"
DEVICES: Final[Mapping[str, str]] = {"nvidia": "cuda", "cpu": "cpu"}
"""Its values -> `engine.device`."""

TRANSLATED: Final[Mapping[str, tuple[str, Mapping[str, str | None]]]] = {
    "DEEPINFER_ENABLE_MTP_VARLEN": ("dspark.verification", {"0": "fixed", "1": "scheduled"}),
    "DEEPINFER_EPLB": ("eplb.interval_steps", {"0": "0", "1": None}),
}
"""Variable -> key of the setting that it names under other values, and those; None: what is set anyway."""

BATCH_INVARIANT: Final = "DEEPINFER_BATCH_INVARIANT"
FIDELITIES: Final[Mapping[str, Mapping[str, str | None]]] = {
    BATCH_INVARIANT: {"0": None, "1": "exact"},
    "DEEPINFER_ENCODER_REPLAY": {"bounded": "fast", "exact": "exact"},
}
"""Variable -> its values -> the fidelity of requests that do not say, which stands for all of them; None: either."""

FIXED: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": (
        ("compact",),
        "upper layers run on the kept rows only, except for requests that ask for prompt_logprobs",
    ),
    "DEEPINFER_MAX_BACKTRACK": ((), "it follows from the model: DEEPINFER_YOCO_PREFILL_KEEP_TOKENS checks the sum"),
    "DEEPINFER_SO_BACKEND": (("llguidance",), "xgrammar is not among the dependencies"),
    "DEEPINFER_MOE_COMM": (("auto", "none"), "there is one way between the ranks that share experts"),
}
"""Variable -> the values that hold whatever is set, and why there are no others."""

CONTRADICTIONS: Final[tuple[tuple[tuple[str, str], tuple[str, str], str], ...]] = (
    (
        ("DEEPINFER_ENABLE_MTP_VARLEN", "1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "0"),
        "where nothing is drafted, there are no lengths to choose",
    ),
    ((BATCH_INVARIANT, "1"), (ACCELERATOR, "ascend"), "such kernels are for other accelerators"),
    (
        (BATCH_INVARIANT, "1"),
        ("DEEPINFER_SPEC_SAMPLING", "rejection"),
        "exact says the same with drafts and without, which takes coupled",
    ),
)
"""Two variables with values that cannot both be had, and why."""


def upstream_values(variables: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(key of a setting, variable, text) for every variable that sets one. An empty variable is unset.

    Raises ConfigError on a value that cannot be had, and if two variables contradict each other; it names them.
    """
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX) and value}
    for one, other, reason in CONTRADICTIONS:
        if all(given.get(variable) == value for variable, value in (one, other)):
            raise ConfigError(f"{'='.join(one)} and {'='.join(other)} contradict each other: {reason}")
    for variable, (values, reason) in FIXED.items():
        if variable in given and given[variable] not in values:
            allowed = f"can only be {' or '.join(values)}" if values else "cannot be set"
            raise ConfigError(f"{variable} {allowed} here, not {given[variable]!r}: {reason}")
    for variable, key in SETTINGS.items():
        if variable in given:
            yield key, variable, given[variable]
    if (accelerator := given.get(ACCELERATOR)) is not None:
        if accelerator not in DEVICES:
            raise ConfigError(
                f"{ACCELERATOR} must be {' or '.join(DEVICES)}, not {accelerator!r}: there are no other kernels"
            )
        yield "engine.device", ACCELERATOR, DEVICES[accelerator]
    for variable, (key, meanings) in TRANSLATED.items():
        if variable in given:
            if given[variable] not in meanings:
                raise ConfigError(f"{variable} must be {' or '.join(meanings)}, not {given[variable]!r}")
            text = meanings[given[variable]]
            if text is not None:
                yield key, variable, text
    asked = _fidelity(given)
    if asked is not None:
        yield "fidelity.default", *asked


def check_fidelity(variables: Mapping[str, str], *, fidelity: str, set_by: str) -> None:
    """Raises ConfigError if what was asked for under an upstream name was unsaid under one of ours."""
    asked = _fidelity({name: value for name, value in variables.items() if value})
    if asked is not None and asked[1] != fidelity:
        raise ConfigError(
            f"{asked[0]}={variables[asked[0]]} and {set_by}={fidelity} contradict each other: it asks for {asked[1]}"
        )


def _fidelity(given: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable, fidelity) that was asked for, by the first that asks."""
    asked: tuple[str, str] | None = None
    for variable, meanings in FIDELITIES.items():
        value = given.get(variable)
        if value is None:
            continue
        if value not in meanings:
            raise ConfigError(f"{variable} must be {' or '.join(meanings)}, not {value!r}")
        fidelity = meanings[value]
        if fidelity is not None and asked is not None and asked[1] != fidelity:
            both = f"{asked[0]}={given[asked[0]]} and {variable}={value}"
            raise ConfigError(f"{both} contradict each other: one asks for {asked[1]}, the other for {fidelity}")
        asked = asked or (None if fidelity is None else (variable, fidelity))
    return asked
