"""What a step costs, from measured steps and from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from whalepod.core.errors import ConfigError
from whalepod.engine.speculation.cost_table import CostTable, MeasuredStep, fit_cost

TABLE = CostTable(
    bias=0.010,
    requests=[(1, 0.0), (8, 0.007)],
    rows=[(1, 0.0), (48, 0.047)],
    draft=[(1, 0.002)],
    model="ab",
    draft_tokens=5,
)


def test_terms_add_up_between_probes_and_stay_constant_outside() -> None:
    assert TABLE.step_seconds(1, np.array([1, 25, 48, 100])) == pytest.approx([0.012, 0.036, 0.059, 0.059])
    assert TABLE.step_seconds(8, np.array([8])) == pytest.approx([0.010 + 0.007 + 0.007 + 0.002])
    assert TABLE.step_seconds(100, np.array([1])) == pytest.approx([0.019])


def test_noise_makes_no_larger_step_cheaper() -> None:
    noisy = CostTable(bias=1, requests=[(1, 0)], rows=[(1, 0), (2, 0.5), (3, 0.4), (4, 0.6)], draft=[(1, 0)])
    assert noisy.step_seconds(1, np.array([1, 2, 3, 4])) == pytest.approx([1, 1.5, 1.5, 1.6])


def test_the_fit_finds_the_terms_of_an_additive_cost() -> None:
    rng = np.random.default_rng(0)
    steps = [
        MeasuredStep(requests, requests + budget, 0.01 + 0.001 * requests + 0.0005 * (requests + budget) + noise, 0.002)
        for requests in (1, 2, 4, 8)
        for budget in range(0, 5 * requests + 1, requests)
        for noise in rng.normal(0, 1e-5, 32)
    ]
    table = fit_cost(steps, model="ab", layout="one", hardware="a machine", draft_tokens=5)
    assert table.rms_seconds < 2e-5
    for requests, rows in ((1, 6), (4, 8), (8, 48), (2, 12)):
        wanted = 0.01 + 0.001 * requests + 0.0005 * rows + 0.002
        assert float(table.step_seconds(requests, np.array(rows))) == pytest.approx(wanted, rel=0.01)


def test_a_file_gives_back_the_table(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "cost.json")
    assert CostTable.read(tmp_path / "cost.json").to_json() == TABLE.to_json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"rows": [[4, 1.0], [2, 2.0]]}, "ascending"),
        ({"rows": []}, "ascending"),
        ({"bias": "much"}, "not a cost table"),
        ({"bias": -5.0}, "no time"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**TABLE.to_json(), **change}), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        CostTable.read(path)
    with pytest.raises(ConfigError, match="missing"):
        CostTable.read(tmp_path / "missing.json")


def test_a_table_of_other_weights_or_of_smaller_steps_is_refused() -> None:
    TABLE.check(model="ab", draft_tokens=5, requests_max=8)
    with pytest.raises(ConfigError, match="weights ab"):
        TABLE.check(model="cd", draft_tokens=5, requests_max=8)
    with pytest.raises(ConfigError, match="verify-cost"):
        TABLE.check(model="ab", draft_tokens=5, requests_max=9)
