"""Weights by role and name: the released list is complete, formats decode, and whatever does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from whalepod.core.errors import CheckpointError
from whalepod.model.checkpoint import check_tensors, load_engram_tables, load_tensors
from whalepod.model.checkpoint_writer import WeightFormat
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import ModelRole, Storage, specs_for_role, stored_names, tensor_specs
from whalepod.model.tiny_checkpoint import SMALLEST, shipped_tokenizer, tiny_weights, write_tiny_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"
RELEASED = ModelConfig.from_json(json.loads((Path(__file__).parents[2] / "model/released_config.json").read_text()))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    """A quantised checkpoint; tests must not change it."""
    directory = tmp_path_factory.mktemp("quantised")
    return directory, write_tiny_checkpoint(directory, form=WeightFormat.RELEASE, block_tokens=16, **SMALLEST)


def rewritten_golden(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> ModelConfig:
    """The golden checkpoint with changed tensors."""
    tensors = load_file(GOLDEN / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return ModelConfig.from_dir(GOLDEN)


def test_the_release_has_96085_tensors() -> None:
    assert len(stored_names(RELEASED)) == 96_085
    assert len({spec.name for spec in tensor_specs(RELEASED)}) == len(tensor_specs(RELEASED))


def test_released_shapes_are_the_published_ones() -> None:
    specs = {spec.name: spec for spec in tensor_specs(RELEASED)}
    assert specs["layers.0.attn.wo_a.weight"].shape == (8192, 4096)
    assert specs["layers.1.engram.embed.weight"].shape == (384006168, 256)
    assert specs["layers.14.engram.wkv.weight"].shape == (25600, 6144)
    assert specs["layers.36.attn.indexer.wq_b.weight"].shape == (4096, 1280)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)
    assert specs["mtp.0.main_proj.weight"].scale_shape((32, 32)) == (160, 480)
    assert specs["aligner.w1.weight"].shape == (5120, 9216)
    expert = specs["layers.39.ffn.experts.383.w2.weight"]
    assert (expert.codes_shape(), expert.scale_shape((32, 32))) == ((5120, 1152), (5120, 72))
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs


def test_the_encoder_role_reads_half_the_experts_and_only_the_producers_of_the_last_source() -> None:
    names = {spec.name for spec in specs_for_role(RELEASED, ModelRole.ENCODER)}
    assert {name for name in names if name.startswith("layers.20.")} == {
        f"layers.20.attn{rest}"
        for rest in (
            "_norm.weight",
            ".wkv.weight",
            ".kv_norm.weight",
            ".compressor.wkv.weight",
            ".compressor.norm.weight",
            ".indexer.wk.weight",
            ".indexer.k_norm.weight",
        )
    }
    assert {name for name in names if not name.startswith("layers.")} == {"embed.weight"}
    assert sum(".ffn.experts." in name for name in names) == 20 * 384 * 3
    assert not any(name.startswith("layers.21.") for name in names)


def test_golden_tensors_load_unchanged_by_their_names() -> None:
    config = ModelConfig.from_dir(GOLDEN)
    stored = load_file(GOLDEN / "model.safetensors")
    loaded = load_tensors(GOLDEN, config, dtype=torch.float32)
    tables = load_engram_tables(GOLDEN, config, dtype=torch.float32)
    assert all(torch.equal(loaded[name], stored[name]) for name in loaded)
    left = stored.keys() - loaded.keys()
    assert {name for name in left if not name.startswith(("vision.", "aligner.", "image_"))} == {
        f"layers.{layer}.engram.embed.weight" for layer in tables
    }
    ids = torch.tensor([[0, 989], [7, 7]])
    assert torch.equal(tables[1].rows(ids), stored["layers.1.engram.embed.weight"][ids])


def test_coefficients_and_routing_biases_stay_float32_in_a_bfloat16_model() -> None:
    loaded = load_tensors(GOLDEN, ModelConfig.from_dir(GOLDEN), dtype=torch.bfloat16)
    kept = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert {name.split(".", 2)[-1] for name in kept} == {
        *("hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"),
        *("attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl"),
    }
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in loaded.items() if name not in kept)
    double = load_tensors(GOLDEN, ModelConfig.from_dir(GOLDEN), role=ModelRole.ENCODER, dtype=torch.float64)
    assert {tensor.dtype for tensor in double.values()} == {torch.float64}


def test_a_quantised_checkpoint_comes_back_close_to_what_was_written(quantised: tuple[Path, ModelConfig]) -> None:
    directory, config = quantised
    written = tiny_weights(config, shipped_tokenizer(), seed=0)
    loaded = load_tensors(directory, config, dtype=torch.float32)
    tables = load_engram_tables(directory, config, dtype=torch.float32)
    for spec in specs_for_role(config, ModelRole.FULL):
        values = written[spec.name]
        if spec.storage is Storage.FP8_ROWS:
            decoded = tables[1].rows(torch.arange(values.shape[0]))
        else:
            decoded = loaded[spec.name]
        error = ((decoded - values).norm() / values.norm()).item()
        # Relative errors of the formats on normal values: nothing, bf16 2^-9, E4M3 about 2^-5, E2M1 about 1/8.
        allowed = {Storage.PLAIN: 0.0 if spec.float32 else 0.003, Storage.MXFP4: 0.2}.get(spec.storage, 0.04)
        assert error <= allowed, (spec.name, error)
        assert spec.storage is Storage.PLAIN or error > 0, f"{spec.name} was not quantised"


def test_a_role_reads_only_what_it_needs(tmp_path: Path) -> None:
    config = rewritten_golden(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.7." in name]
    )
    assert "layers.6.attn.wkv.weight" in load_tensors(tmp_path, config, role=ModelRole.ENCODER)
    with pytest.raises(CheckpointError, match=r"layers\.7"):
        load_tensors(tmp_path, config)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["layers.3.attn.wkv.weight"]
        tensors["layers.3.attn.wkv.bias"] = torch.zeros(64)
        tensors["head.weight"] = torch.zeros(511, 128)
        tensors["norm.weight"] = torch.zeros(128, dtype=torch.int32)

    config = rewritten_golden(tmp_path, spoil)
    with pytest.raises(CheckpointError) as refused:
        load_tensors(tmp_path, config)
    message = str(refused.value)
    assert "missing layers.3.attn.wkv.weight" in message
    assert "unexpected layers.3.attn.wkv.bias" in message
    assert "head.weight has shape [511, 128], not [512, 128]" in message
    assert "norm.weight is stored as I32" in message


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    config = rewritten_golden(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts.1." in name]
    )
    with pytest.raises(CheckpointError, match=r"… \(39 in all\)"):
        load_tensors(tmp_path, config)


def test_a_missing_scale_is_named(tmp_path: Path, quantised: tuple[Path, ModelConfig]) -> None:
    directory, config = quantised
    tensors: dict[str, Tensor] = {}
    for shard in directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    del tensors["layers.0.attn.wkv.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing layers\.0\.attn\.wkv\.scale"):
        check_tensors(tmp_path, config)


def test_codes_without_a_quantization_config_are_refused(quantised: tuple[Path, ModelConfig]) -> None:
    directory, _ = quantised
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_tensors(directory, ModelConfig.from_json(values))


def test_a_shard_that_is_absent_or_cut_short_is_named(tmp_path: Path, quantised: tuple[Path, ModelConfig]) -> None:
    directory, config = quantised
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load_tensors(tmp_path, config)
    second.unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load_tensors(tmp_path, config)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_tensors(tmp_path, RELEASED)


def test_loaded_tensors_do_not_change_with_the_file(tmp_path: Path) -> None:
    config = rewritten_golden(tmp_path, lambda tensors: None)
    loaded = load_tensors(tmp_path, config, dtype=torch.float32)
    before = loaded["norm.weight"].clone()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * (path.stat().st_size // 2))
    assert torch.equal(loaded["norm.weight"], before)
    assert all(tensor.isfinite().all() for tensor in loaded.values())
