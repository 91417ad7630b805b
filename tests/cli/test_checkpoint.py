"""`whalepod checkpoint`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from whalepod.cli.checkpoint import app
from whalepod.core.errors import CheckpointError, ConfigError
from whalepod.model.config import ModelConfig
from whalepod.model.tokenizer import Tokenizer


def typed(*words: object) -> str:
    """Standard output of the command; its own errors are raised, as `main` catches them."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tiny_with_as_many_experts_as_asked_for(tmp_path: Path) -> None:
    typed("tiny", tmp_path / "model", "--experts", 24)
    assert ModelConfig.from_dir(tmp_path / "model").n_routed_experts == 24
    assert "everything fits" in typed("check", tmp_path / "model")


def test_tiny_writes_a_checkpoint_that_check_accepts_and_fingerprint_names(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert "blocks of 64 tokens" in typed("tiny", model, "--format", "release")
    assert ModelConfig.from_dir(model).quantization_config is not None
    assert "everything fits" in typed("check", model)
    assert "role encoder" in typed("check", model, "--role", "encoder")
    name = typed("fingerprint", model, "--write").strip()
    assert len(bytes.fromhex(name)) == 32
    assert (model / "SHA256SUMS").exists()
    assert typed("fingerprint", model).strip() == name
    with pytest.raises(ConfigError, match="--force"):
        typed("tiny", model)
    typed("tiny", model, "--force", "--seed", 1)
    assert typed("fingerprint", model).strip() != name


def test_check_says_what_is_wrong(tmp_path: Path) -> None:
    typed("tiny", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        typed("check", tmp_path / "model")


def test_tokenizer_is_trained_on_the_given_texts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("whale whale whale pod", encoding="utf-8")
    output = tmp_path / "tokenizer.json"
    typed("tokenizer", output, "--text", tmp_path / "text", "--entries", 512)
    assert len(Tokenizer(output.read_text(encoding="utf-8")).encode("whale")) == 1


def test_an_unknown_format_is_a_usage_error(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["tiny", str(tmp_path / "x"), "--format", "int3"]).exit_code == 2
