"""The configuration: the released file reads as published, contradictions are refused by name, sizes follow from it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from whalepod.core.errors import ConfigError
from whalepod.model.config import ModelConfig

RELEASED = json.loads((Path(__file__).parents[2] / "model/released_config.json").read_text())
GOLDEN = Path(__file__).parents[1] / "golden"


def released() -> ModelConfig:
    return ModelConfig.from_json(RELEASED)


def released_with(**changes: Any) -> dict[str, Any]:
    """The released file with other `text_config` fields."""
    values = copy.deepcopy(RELEASED)
    values["text_config"].update(changes)
    return values


def test_released_sizes_follow_from_the_file() -> None:
    config = released()
    assert (config.window, config.kept_rows, config.group_tokens, config.block_tokens) == (128, 140, 2, 256)
    assert config.dtype == "bfloat16"
    assert config.image_token_id == 129264
    assert config.quantization_config is not None
    assert config.quantization_config.weight_block_size == (32, 32)
    assert config.vision_config is not None
    assert config.vision_config.max_wh_ratio is None


def test_every_layer_finds_its_sources() -> None:
    config = released()
    assert [config.kv_source(layer) for layer in range(40)] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    index_sources = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [config.index_source(layer) for layer in range(40)] == index_sources
    assert [config.kv_source(block) for block in (40, 41, 42)] == [None] * 3
    assert [config.ratio(layer) for layer in (1, 2, 19, 20, 39, 42)] == [0, 2, 2, 1, 1, 0]


def test_released_ngram_primes_and_multipliers_are_the_published_ones() -> None:
    first, second = released().engram
    assert [prime - 16_000_000 for prime in first.primes[:8]] == [57, 79, 81, 97, 121, 129, 133, 183]
    assert [prime - 16_000_000 for prime in second.primes[-3:]] == [877, 879, 889]
    assert (first.rows, second.rows) == (384006168, 384016682)
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)


@pytest.mark.parametrize("source", ["units", "tiny_a"])
def test_ngram_layout_equals_the_reference(source: str) -> None:
    if source == "units":
        config, prefix = released(), "released_ngram."
        vectors = load_file(GOLDEN / "units.safetensors")
    else:
        config, prefix = ModelConfig.from_dir(GOLDEN / "tiny_a" / "ckpt_f32"), ""
        vectors = load_file(GOLDEN / "tiny_a" / "engram.safetensors")
    for name in ("primes", "offsets", "multipliers"):
        ours = torch.tensor([getattr(layout, name) for layout in config.engram])
        assert torch.equal(ours, vectors[f"{prefix}{name}"].reshape(ours.shape)), name


def test_rope_of_window_layers_is_plain_and_of_compressed_layers_yarn() -> None:
    config = released()
    plain = config.rope(0)
    assert (plain.dim, plain.theta, plain.factor) == (64, 10000.0, 1.0)
    assert config.rope(41) == plain
    yarn = config.rope(20)
    assert yarn == config.rope(2)
    assert (yarn.theta, yarn.factor, yarn.low, yarn.high) == (160000.0, 16.0, 15.0, 25.0)


def test_yarn_bounds_stay_inside_the_rotary_channels() -> None:
    config = ModelConfig.from_dir(GOLDEN / "tiny_a" / "ckpt_f32")
    unclamped = 16 * math.log(64 / (32 * 2 * math.pi)) / (2 * math.log(160000))
    assert unclamped < 0
    assert (config.rope(2).low, config.rope(2).high) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("boundary", "floor", "rows"),
    [
        (5120, 5120, 21 * 127),
        (5120, 5120 + 27, 20 * 127 + 100),
        (5120, 5120 + 127, 20 * 127),
        (5120, 9000, 20 * 127),
        (1024, 1024, 1024),
        (0, 0, 0),
    ],
)
def test_halo_is_as_long_as_the_windows_reach(boundary: int, floor: int, rows: int) -> None:
    assert released().halo_rows(boundary=boundary, floor=floor) == rows


def test_floor_keeps_the_last_k_rows_of_a_prompt() -> None:
    assert [released().floor(tokens) for tokens in (1, 140, 141, 1000)] == [0, 0, 1, 860]


def test_small_models_get_small_blocks_and_may_name_their_own() -> None:
    tiny = json.loads((GOLDEN / "tiny_a" / "ckpt_f32" / "config.json").read_text())
    assert ModelConfig.from_json(tiny).block_tokens == 16
    assert ModelConfig.from_json({**tiny, "whalepod": {"block_tokens": 64}}).block_tokens == 64
    tiny["text_config"]["compress_ratios"] = [0, 0, 3, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0]
    config = ModelConfig.from_json(tiny)
    assert (config.group_tokens, config.block_tokens) == (6, 18)


def test_unknown_fields_are_ignored_and_null_is_unset() -> None:
    values = released_with(initializer_range=0.02, gate_temp=1.0, q_head_norm=None)
    assert ModelConfig.from_json({**values, "transformers_version": "5"}) == released()


def test_a_model_without_drafter_vision_and_ngrams_is_fine() -> None:
    values = released_with(
        num_nextn_predict_layers=0,
        engram_layer_ids=[],
        engram_num_embeddings=[],
        compress_ratios=[0, 0, *[2] * 18, *[1] * 20],
    )
    del values["vision_config"], values["quantization_config"]
    config = ModelConfig.from_json(values)
    assert (config.engram, config.vision_config, config.quantization_config) == ((), None, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_source_layer_ids": [2, 8, 15, 20]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "candidate_source_layer_id"),
        ({"compress_ratios": [0] * 42}, "compress_ratios"),
        ({"compress_ratios": [0, 2, *[2] * 18, *[1] * 20, 0, 0, 0]}, "compress_ratios[1]"),
        ({"compress_ratios": [0, 0, *[2] * 18, 1, 2, *[1] * 18, 0, 0, 0]}, "compress_ratios[21]"),
        ({"compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, *[2] * 18, *[2] * 20, 0, 0, 0]}, "compress_ratios[21]"),
        ({"engram_layer_ids": [1, 21]}, "engram_layer_ids"),
        ({"engram_num_embeddings": [384006168, 384016681]}, "engram_num_embeddings"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, "index_source_layer_ids"),
        ({"q_head_norm": True}, "q_head_norm"),
        ({"hc_pre_from_prev_sublayer": False}, "hc_pre_from_prev_sublayer"),
        ({"n_group": 8}, "n_group"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok"),
        ({"dspark_target_layer_ids": [40]}, "dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id"),
        ({"o_groups": 7}, "o_groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"hidden_size": "5120"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"compress_ratios": 2}, "compress_ratios"),
        ({"compress_ratios": [0.5]}, "compress_ratios[0]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 16}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 16, "original_max_position_embeddings": 1}}, "rope_type"),
    ],
)
def test_a_contradiction_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_json(released_with(**changes))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ({"whalepod": {"block_tokens": 255}}, "block_tokens"),
        ({"whalepod": {"block_tokens": 0}}, "block_tokens"),
        ({"image_token_id": None}, "image_token_id"),
        ({"dtype": "float8"}, "dtype"),
        ({"quantization_config": {"weight_block_size": [32]}}, "weight_block_size"),
        ({"quantization_config": {"weight_block_size": [32, 32], "quant_method": "awq"}}, "quant_method"),
        ({"text_config": "x"}, "text_config"),
        ({"vision_config": []}, "vision_config"),
    ],
)
def test_a_bad_top_level_value_is_refused_by_name(top: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_json({**RELEASED, **top})
    assert named in str(refused.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_file_is_a_config_error_that_names_it(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
