"""The published engine's variables, as this one takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalepod.cluster.config_sources import load_config
from whalepod.cluster.upstream_variables import BATCH_INVARIANT, FIXED, NAMES
from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity


def test_names_of_settings_are_taken_and_ours_win() -> None:
    assert load_config(variables={"DEEPINFER_ASYNC_SCHEDULING": "0"}).engine.async_scheduling is False
    both = {"DEEPINFER_ASYNC_SCHEDULING": "0", "WHALEPOD_ENGINE_ASYNC_SCHEDULING": "1"}
    assert load_config(variables=both).engine.async_scheduling is True


@pytest.mark.parametrize(("text", "fidelity"), [("1", Fidelity.EXACT), ("0", Fidelity.FAST), ("", Fidelity.FAST)])
def test_batch_invariance_is_fidelity(text: str, fidelity: Fidelity) -> None:
    assert load_config(variables={BATCH_INVARIANT: text}).fidelity.default is fidelity


def test_a_contradiction_names_both() -> None:
    both = {BATCH_INVARIANT: "1", "WHALEPOD_FIDELITY_DEFAULT": "fast"}
    with pytest.raises(ConfigError, match="DEEPINFER_BATCH_INVARIANT=1 and WHALEPOD_FIDELITY_DEFAULT=fast"):
        load_config(variables=both)
    with pytest.raises(ConfigError, match="must be 0 or 1"):
        load_config(variables={BATCH_INVARIANT: "yes"})


@pytest.mark.parametrize("variable", FIXED)
def test_what_holds_anyway_may_be_said_but_nothing_else(variable: str) -> None:
    load_config(variables={variable: FIXED[variable][0]})
    with pytest.raises(ConfigError, match=variable):
        load_config(variables={variable: "off"})


def test_the_page_lists_every_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert all(f"| `{variable}` |" in page for variable in (*NAMES, BATCH_INVARIANT, *FIXED))
