"""`whalepod eval`, as it is typed: on random weights, which know nothing, so that what is checked is how it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests.engine.evaluation.held_out_file import every_kind, write_held_out
from whalepod.cli.eval import evaluate
from whalepod.core.errors import ConfigError
from whalepod.engine.evaluation import evaluation
from whalepod.engine.evaluation.baseline import BASELINE_FILE, TRAINING_FILE
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.options import TEMPERATURES_FILE
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "model"
    write_tiny_checkpoint(directory, block_tokens=16, **SMALLEST)
    write_held_out(directory, every_kind())
    quick = replace(
        evaluation.QUICK, turn_documents=2, turn_answer_tokens=6, turns_max=2, questions=1, drafted_answers=2,
        drafted_tokens=6, timed_answers=2, kind_tokens=200, ablation_tokens=60,
    )  # fmt: skip
    monkeypatch.setattr(evaluation, "QUICK", quick)
    return directory


def typed(*words: object) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and the JSON object on the last line."""
    app = typer.Typer()
    app.command()(evaluate)
    result = CliRunner().invoke(app, ["--threads", "1", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout, json.loads(result.stdout.splitlines()[-1])


def test_the_loss_of_random_weights_is_near_that_of_guessing(model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = every_kind()
    np.array([token for line in lines[:6] for token in line["ids"]], "<u2").tofile(corpus / TRAINING_FILE)
    write_held_out(corpus, lines)
    code, printed, figures = typed("--quick", "--model", model, "--part", "loss", "--data", corpus, "--record")
    assert code == 0
    assert "computed now" in printed
    assert 8 < figures["by_kind"]["all"]["nats_per_token"] < 15, "the logarithm of 6144 entries is 8.7"
    assert figures["bits_per_byte_5gram"] < 1.5, "it has seen this text"
    assert figures["baseline_recorded"] is False
    again = typed("--quick", "--model", model, "--part", "loss")
    assert "recorded beside the model" in again[1]
    assert again[2]["baseline_recorded"] is True
    assert again[2]["bits_per_byte_5gram"] == pytest.approx(figures["bits_per_byte_5gram"], abs=1e-3)
    assert again[2]["bits_per_byte"] == figures["bits_per_byte"]
    (model / BASELINE_FILE).unlink()
    assert "none is recorded" in typed("--quick", "--model", model, "--part", "loss")[1]


@pytest.mark.slow
def test_everything_is_measured_and_the_last_line_has_the_figures(model: Path) -> None:
    drafts = int(SMALLEST.get("dspark_block_size", 5))
    table = Calibration([2.0] * drafts, 100, [0] * drafts, [0] * drafts, [0.5] * drafts, [0] * drafts)
    table.write(model / TEMPERATURES_FILE)
    code, printed, figures = typed("--quick", "--model", model)
    assert code == 0
    for name in ("bits_per_byte", "bounded_replay_cost", "fp4_cost", "accepted_length", "ece"):
        assert isinstance(figures[name], float), name
    hits = figures["answers_after_hits"]
    assert hits["found"] == hits["exact_found"] == hits["prompts"] > 0
    assert 0 < hits["replayed_tokens"] < hits["exact_replayed_tokens"]
    assert figures["recall"]["as_served"]["asked"] == 1
    assert figures["json"]["guided"]["asked"] == figures["tool_calls"]["guided"]["asked"] == 1
    assert {"engram_zeroed", "newest_entries", "markov_zeroed"} <= set(figures["ablations"])
    assert figures["ablations"]["engram_zeroed"]["loss_cost"] != 0
    assert 1 <= figures["accepted_length"] < 2, "drafts of random weights hardly ever stand"
    assert set(figures["tokens_per_second"]["1"]) == {"off", "1", "2", str(drafts)}
    assert "What it costs in loss" in printed


def test_what_cannot_be_done_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--part must be one of loss, serving"):
        typed("--model", model, "--part", "everything")
    with pytest.raises(ConfigError, match="name the data too"):
        typed("--model", model, "--record")
    (model / "heldout.jsonl.xz").unlink()
    with pytest.raises(ConfigError, match="there is no held-out text at"):
        typed("--model", model)
