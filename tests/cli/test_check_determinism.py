"""`whalepod check-determinism`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from whalepod.cli.check_determinism import check_determinism
from whalepod.engine import determinism
from whalepod.engine.determinism import DeterminismPlan, DeterminismReport

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"


def typed(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(check_determinism)
    result = CliRunner().invoke(app, ["--model", str(CHECKPOINT), *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_last_line_has_the_figures() -> None:
    code, last = typed("--schedules", "2")
    figures = json.loads(last)
    assert code == 0
    assert (figures["schedules"], figures["different"]) == (2, 0)
    assert figures["passed"]


@pytest.mark.parametrize(("different", "code"), [(0, 0), (3, 1)])
def test_a_difference_fails_the_command(different: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(_model: object, plan: DeterminismPlan, **_: object) -> DeterminismReport:
        return DeterminismReport(
            schedules=plan.schedules, different=different, control_seen=True, seed_changed_own=True
        )

    monkeypatch.setattr(determinism, "check_determinism", reported)
    found, last = typed("--quick")
    assert found == code
    assert json.loads(last)["different"] == different
    assert json.loads(last)["schedules"] == 20
