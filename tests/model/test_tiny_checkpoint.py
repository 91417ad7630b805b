"""The tiny model: written in seconds, the same every time, complete, and never over somebody's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from whalepod.core.errors import ConfigError
from whalepod.model.checkpoint import check_tensors, load_tensors
from whalepod.model.checkpoint_writer import WeightFormat
from whalepod.model.config import ModelConfig
from whalepod.model.engram_token_map import engram_token_map
from whalepod.model.prompt import PromptEncoder
from whalepod.model.tensor_layout import Part, tensor_specs
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.weights_fingerprint import weights_fingerprint


def write_smallest(directory: Path, *, seed: int = 0, form: WeightFormat = WeightFormat.FLOAT32) -> ModelConfig:
    return write_tiny_checkpoint(directory, seed=seed, form=form, block_tokens=16, **SMALLEST)


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_shipped_model_has_the_published_sizes(tmp_path: Path) -> None:
    config = write_tiny_checkpoint(tmp_path)
    assert config == ModelConfig.from_dir(tmp_path)
    assert (config.window, config.kept_rows, config.block_tokens, config.group_tokens) == (32, 44, 64, 2)
    assert config.max_position_embeddings >= 8192
    assert {spec.part for spec in tensor_specs(config)} == set(Part)
    assert check_tensors(tmp_path, config) > 0
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.ids_end == config.vocab_size
    assert engram_token_map(tokenizer, config).shape == (config.vocab_size,)
    PromptEncoder.from_dir(tmp_path, config, served_names=["tiny"])
    assert tokenizer.token_bytes(config.dspark_noise_token_id) == "<｜dspark▁noise｜>".encode()


@pytest.mark.parametrize("form", list(WeightFormat))
def test_a_seed_names_the_bytes(tmp_path: Path, form: WeightFormat) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_smallest(tmp_path / name, seed=seed, form=form)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "c")


def test_the_released_form_is_sharded_quantised_and_smaller(tmp_path: Path) -> None:
    write_smallest(tmp_path / "plain")
    config = write_smallest(tmp_path / "release", form=WeightFormat.RELEASE)
    assert config.quantization_config is not None
    assert config.dtype == "bfloat16"
    index = json.loads((tmp_path / "release" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    sizes = {
        name: sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        for name in ("plain", "release")
    }
    assert sizes["release"] < sizes["plain"] * 0.6
    assert index["metadata"]["total_size"] == pytest.approx(sizes["release"], rel=0.05)


def test_both_forms_hold_about_the_same_weights(tmp_path: Path) -> None:
    plain = write_smallest(tmp_path / "plain")
    release = write_smallest(tmp_path / "release", form=WeightFormat.RELEASE)
    first = load_tensors(tmp_path / "plain", plain, dtype=torch.float32)
    second = load_tensors(tmp_path / "release", release, dtype=torch.float32)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert ((second[name] - values).norm() / values.norm()).item() < 0.2, name


def test_a_directory_with_files_is_left_alone_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write_smallest(tmp_path)
    assert contents(tmp_path).keys() == {"notes.txt"}
    write_tiny_checkpoint(tmp_path, force=True, form=WeightFormat.RELEASE, block_tokens=16, **SMALLEST)
    (tmp_path / "SHA256SUMS").write_text("")
    write_tiny_checkpoint(tmp_path, force=True, block_tokens=16, **SMALLEST)
    assert contents(tmp_path).keys() == {"notes.txt", "config.json", "tokenizer.json", "model.safetensors"}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overrides_that_contradict_each_other_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compress_ratios"):
        write_tiny_checkpoint(tmp_path / "x", num_hidden_layers=9)
    assert not (tmp_path / "x").exists()
