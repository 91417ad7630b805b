"""`whalepod bench` and `whalepod dspark`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.engine.evaluation.held_out_file import every_kind, write_held_out
from whalepod.cli import bench, dspark
from whalepod.cli.bench import prompt_ids
from whalepod.core.errors import ConfigError
from whalepod.engine.rank_model import RankModel
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"


def typed(app: typer.Typer, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [*arguments, "--model", str(CHECKPOINT)], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_cost_table_is_written_and_can_be_scheduled_by(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    written = typed(bench.app, "verify-cost", "--output", str(cost), "--requests-max", "2", "--steps", "4")
    assert written["rows_max"] == CostTable.read(cost).rows_max == 12
    few = ("--requests", "2", "--answer-tokens", "6", "--cost-table", str(cost))
    figures = typed(bench.app, "dspark", *few)
    assert set(figures) == {"requests", "off", "fixed", "scheduled"}
    lucky = typed(bench.app, "dspark", *few, "--simulate-acceptance", "1")["fixed"]
    assert isinstance(lucky, dict)
    assert lucky["acceptance"][0] == 1


@pytest.mark.slow
def test_temperatures_are_written_for_the_prompts_of_a_file(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "temperatures.json"
    prompts.write_text("one two\n\nthree\n" * 4, encoding="utf-8")
    asked = ("--prompts", str(prompts), "--answer-tokens", "40", "--draft-tokens", "2")
    figures = typed(dspark.app, "calibrate", "--output", str(output), *asked)
    assert figures["temperatures"] == list(Calibration.read(output).temperatures)
    typed(
        bench.app,
        "dspark",
        "--requests",
        "2",
        "--answer-tokens",
        "6",
        "--draft-tokens",
        "2",
        "--temperature-table",
        str(output),
    )


def test_the_last_chats_of_held_out_text_are_prompts(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", block_tokens=16, **SMALLEST)
    model = RankModel.load(tmp_path / "model", threads=1)
    lines = [line for line in every_kind() if line["kind"] == "chat"]
    last = {**lines[0], "body": {"messages": [{"role": "user", "content": "the last"}]}}
    file = write_held_out(tmp_path, [*every_kind(), last])
    both = prompt_ids(model, file, 9)
    assert len(both) == len(lines) + 1
    assert prompt_ids(model, file, 1) == both[-1:] != both[:1]
    words = b"".join(map(model.tokenizer.token_bytes, both[-1]))
    assert b"the last" in words


def test_too_few_answers_calibrate_nothing(tmp_path: Path) -> None:
    output = tmp_path / "temperatures.json"
    with pytest.raises(ConfigError, match="at least 100"):
        typed(dspark.app, "calibrate", "--output", str(output), "--requests", "1", "--answer-tokens", "4")
    assert not output.exists()
