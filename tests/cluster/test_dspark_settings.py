"""What is said about drafts makes sense together, and becomes what a rank speculates by."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalepod.cluster.config_sources import load_config
from whalepod.core.errors import ConfigError
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.options import Acceptance, DraftSampling, Verification
from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--dspark-verification", "scheduled"),
        ("--dspark-cost-table", "cost.json"),
        ("--dspark-temperature-table", "temperatures.json"),
        ("--dspark-simulate-acceptance", "0.5"),
    ],
)
def test_settings_of_drafts_without_drafts_are_refused(flag: str, value: str) -> None:
    load_config(flags={flag: value})
    with pytest.raises(ConfigError, match=r"dspark\.draft_tokens is 0"):
        load_config(flags={flag: value, "--dspark-draft-tokens": "0"})


def test_every_setting_reaches_the_rank(tmp_path: Path) -> None:
    cost, temperatures = tmp_path / "cost.json", tmp_path / "temperatures.json"
    CostTable(bias=1, requests=[(1, 0)], rows=[(1, 0), (99, 1)], draft=[(1, 0)]).write(cost)
    Calibration([1.0, 2.0], 100, [0, 0], [0, 0], [0.5, 0.5], [0, 0]).write(temperatures)
    flags = {
        "--dspark-draft-tokens": "2",
        "--dspark-verification": "scheduled",
        "--dspark-acceptance": "coupled",
        "--dspark-draft-sampling": "greedy",
        "--dspark-cost-table": str(cost),
        "--dspark-temperature-table": str(temperatures),
        "--dspark-budget-lag": "3",
        "--dspark-gain-min": "0.1",
        "--dspark-simulate-acceptance": "0.75",
    }
    options = load_config(flags=flags).dspark.options(ModelConfig.from_json(tiny_config_json(shipped_tokenizer())))
    assert options is not None
    assert (options.draft_tokens, options.lag_steps, options.gain_min) == (2, 3, 0.1)
    assert (options.verification, options.acceptance) == (Verification.SCHEDULED, Acceptance.COUPLED)
    assert (options.draft_sampling, options.simulated_acceptance) == (DraftSampling.GREEDY, 0.75)
    assert options.cost is not None
    assert options.cost.rows_max == 99
    assert options.calibration is not None
    assert list(options.calibration.temperatures) == [1, 2]


def test_a_cluster_offers_no_early_stopping() -> None:
    with pytest.raises(ConfigError, match=r"early_stop is for offline engines only: use fixed or scheduled"):
        load_config(flags={"--dspark-verification": "early_stop"})


@pytest.mark.parametrize("drafts", ["-1", "many"])
def test_a_bad_number_of_drafts_is_refused_by_name(drafts: str) -> None:
    with pytest.raises(ConfigError, match="dspark-draft-tokens"):
        load_config(flags={"--dspark-draft-tokens": drafts})
