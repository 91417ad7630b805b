"""The published engine's variables, as this one takes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whalepod.core.errors import ConfigError
from whalepod.core.upstream_variables import (
    ACCELERATOR,
    BATCH_INVARIANT,
    FIDELITIES,
    FIXED,
    SETTINGS,
    TRANSLATED,
    check_fidelity,
    upstream_values,
)

ROOT = Path(__file__).parents[2]


def values(**variables: str) -> dict[str, str]:
    named = {f"DEEPINFER_{name}": value for name, value in variables.items()}
    return {key: text for key, _, text in upstream_values(named)}


def test_nothing_set_asks_for_nothing() -> None:
    assert values() == values(BATCH_INVARIANT="", HF_MODEL_DIR="", ENCODER_REPLAY="") == {}
    assert dict.fromkeys(FIXED, "") and not list(upstream_values(dict.fromkeys(FIXED, "")))


def test_names_of_settings_are_taken() -> None:
    named = dict.fromkeys(SETTINGS, "7")
    assert list(upstream_values(named)) == [(key, variable, "7") for variable, key in SETTINGS.items()]


@pytest.mark.parametrize(
    ("name", "value", "fidelity"),
    [
        ("BATCH_INVARIANT", "1", "exact"),
        ("BATCH_INVARIANT", "0", None),
        ("ENCODER_REPLAY", "bounded", "fast"),
        ("ENCODER_REPLAY", "exact", "exact"),
    ],
)
def test_what_asks_for_a_fidelity_is_one(name: str, value: str, fidelity: str | None) -> None:
    assert values(**{name: value}).get("fidelity.default") == fidelity


def test_an_accelerator_is_a_device_and_there_are_two() -> None:
    assert values(ACCELERATOR="nvidia") == {"engine.device": "cuda"}
    assert values(ACCELERATOR="cpu") == {"engine.device": "cpu"}
    with pytest.raises(ConfigError, match="DEEPINFER_ACCELERATOR must be nvidia or cpu, not 'ascend'"):
        values(ACCELERATOR="ascend")


@pytest.mark.parametrize("variable", FIDELITIES)
def test_another_value_is_refused_with_those_that_are_taken(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} must be {' or '.join(FIDELITIES[variable])}, not 'off'"):
        list(upstream_values({variable: "off"}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"BATCH_INVARIANT": "1"}, {"ENCODER_REPLAY": "bounded"}),
        ({"ENABLE_MTP_VARLEN": "1"}, {"USE_NEXTN_DECODE": "0"}),
        ({"BATCH_INVARIANT": "1"}, {"ACCELERATOR": "ascend"}),
        ({"BATCH_INVARIANT": "1"}, {"SPEC_SAMPLING": "rejection"}),
    ],
)
def test_a_contradiction_names_both(one: dict[str, str], other: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="contradict each other") as caught:
        values(**one, **other)
    for name, value in (one | other).items():
        assert f"DEEPINFER_{name}={value}" in str(caught.value)


def test_a_fidelity_of_ours_that_says_something_else_is_a_contradiction() -> None:
    asked = {BATCH_INVARIANT: "1"}
    check_fidelity(asked, fidelity="exact", set_by="fidelity")
    check_fidelity({}, fidelity="fast", set_by="fidelity")
    with pytest.raises(ConfigError, match="DEEPINFER_BATCH_INVARIANT=1 and fidelity=fast contradict each other"):
        check_fidelity(asked, fidelity="fast", set_by="fidelity")


@pytest.mark.parametrize("variable", FIXED)
def test_what_holds_anyway_may_be_said_and_what_cannot_be_had_is_refused_with_a_reason(variable: str) -> None:
    allowed, reason = FIXED[variable]
    for value in allowed:
        assert list(upstream_values({variable: value})) == []
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        list(upstream_values({variable: "something"}))
    assert str(caught.value).startswith(variable)


def test_the_page_lists_every_one() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(DEEPINFER_\w+)` \|", page, flags=re.MULTILINE))
    assert listed == {*SETTINGS, *TRANSLATED, ACCELERATOR, *FIDELITIES, *FIXED}


def test_lengths_by_confidence_are_a_way_to_verify() -> None:
    assert values(ENABLE_MTP_VARLEN="1", USE_NEXTN_DECODE="3") == {
        "dspark.verification": "scheduled",
        "dspark.draft_tokens": "3",
    }
    assert values(ENABLE_MTP_VARLEN="0") == {"dspark.verification": "fixed"}
    with pytest.raises(ConfigError, match="DEEPINFER_ENABLE_MTP_VARLEN must be 0 or 1, not 'yes'"):
        values(ENABLE_MTP_VARLEN="yes")
