"""`whalepod golden`, as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from whalepod.cli.golden import golden
from whalepod.core.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"


def typed(directory: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the JSON object on the last line."""
    app = typer.Typer()
    app.command()(golden)
    result = CliRunner().invoke(app, [str(directory), *options], catch_exceptions=False)
    lines = result.stdout.splitlines()
    return result.exit_code, result.stdout, json.loads(lines[-1])


@pytest.fixture
def units(tmp_path: Path) -> Path:
    shutil.copy(GOLDEN / "units.safetensors", tmp_path / "units.safetensors")
    return tmp_path


def test_the_last_line_has_the_figures(units: Path) -> None:
    code, printed, figures = typed(units)
    assert code == 0
    assert figures["passed"] is True
    assert 0 < figures["max_abs"] < 1e-6
    assert figures["sets"] == {"passed": 11, "failed": 0, "not_implemented": 0, "not_applicable": 0}
    assert "units mhc" in printed


@pytest.mark.parametrize("fidelity", ["exact", "fast"])
def test_both_fidelities_pass(units: Path, fidelity: str) -> None:
    assert typed(units, "--fidelity", fidelity)[2]["passed"] is True


def test_a_failed_set_fails_the_command_and_is_explained(units: Path) -> None:
    arrays = load_file(units / "units.safetensors")
    arrays["router.ids"][0, 0] += 1
    arrays["rmsnorm.out_eps1e-20"][0, 0] += 0.5
    save_file(arrays, units / "units.safetensors")
    code, printed, figures = typed(units)
    assert code == 1
    assert figures["passed"] is False
    assert figures["max_abs"] == pytest.approx(0.5, abs=1e-3)
    assert figures["sets"]["failed"] == 2
    assert "ids: 1 of 18 differ" in printed


def test_a_directory_without_vectors_is_a_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no golden vectors"):
        typed(tmp_path)


@pytest.mark.slow
def test_the_shipped_vectors_pass() -> None:
    code, printed, figures = typed(GOLDEN)
    assert code == 0, printed
    assert figures["max_abs"] < 3e-5  # of `vl_f32`, where float64 is as far from the reference
    assert figures["sets"]["failed"] == 0
