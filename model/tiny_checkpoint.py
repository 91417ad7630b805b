"""A tiny random model with every part of the released one, and the shipped tokenizer: runs on a laptop and in tests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoint_writer import WeightFormat, prepare_directory, write_checkpoint
from .config import ModelConfig
from .engram_layout import engram_layouts
from .engram_token_map import compressed_vocab_size
from .random_weights import random_weights
from .special_tokens import IMAGE_SPELLING, NOISE_SPELLING
from .tensor_layout import tensor_specs
from .tokenizer import TOKENIZER_FILE, Tokenizer

BLOCK_TOKENS = 64

# About 8 M parameters. Layer roles as in the release: windows only, sources of ratio 2, then a last source of ratio 1
# and an index source above it; n-gram layers below and at a source.
_TEXT: Mapping[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "max_position_embeddings": 16384,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 32,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}
_VISION: Mapping[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}
_QUANTIZATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

SMALLEST: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_topk": 8,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "sliding_window": 16,
    "engram_layer_ids": [1],
    "engram_vocab_size": 100,
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [4, 5],
    "dspark_n_routed_experts": 4,
}
"""Overrides for tests: K = 28; give `block_tokens=16` with them."""


def shipped_tokenizer() -> Tokenizer:
    """The tokenizer that ships with Whalepod (`assets/README.md` says what it was trained on)."""
    return Tokenizer((resources.files("whalepod.model") / "assets" / TOKENIZER_FILE).read_text(encoding="utf-8"))


def tiny_config_json(
    tokenizer: Tokenizer,
    *,
    form: WeightFormat = WeightFormat.FLOAT32,
    block_tokens: int = BLOCK_TOKENS,
    **overrides: object,
) -> dict[str, Any]:
    """The nested `config.json`. `overrides` replace `text_config` fields; vocabulary and n-gram sizes follow."""
    text: dict[str, Any] = {
        **_TEXT,
        "vocab_size": tokenizer.ids_end,
        "dspark_noise_token_id": tokenizer.token_id(NOISE_SPELLING),
        "engram_compressed_vocab_size": compressed_vocab_size(tokenizer),
        **overrides,
    }
    layouts = engram_layouts(
        text["engram_layer_ids"],
        vocab_size=text["engram_vocab_size"],
        max_ngram_size=text["engram_max_ngram_size"],
        n_heads=text["engram_n_heads"],
        compressed_vocab_size=text["engram_compressed_vocab_size"],
    )
    text["engram_num_embeddings"] = [layout.rows for layout in layouts]
    values: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32" if form is WeightFormat.FLOAT32 else "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_id(IMAGE_SPELLING),
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": dict(_VISION),
        "whalepod": {"block_tokens": block_tokens},
    }
    if form is WeightFormat.RELEASE:
        values["quantization_config"] = dict(_QUANTIZATION)
    return values


def write_tiny_checkpoint(
    directory: Path | str,
    *,
    seed: int = 0,
    form: WeightFormat = WeightFormat.FLOAT32,
    force: bool = False,
    block_tokens: int = BLOCK_TOKENS,
    **overrides: object,
) -> ModelConfig:
    """Write the model into `directory` and return its configuration. The same arguments give the same bytes.

    `overrides` replace fields of `text_config` (`SMALLEST` is a set for tests). Raises ConfigError if they contradict
    each other, or if the directory is not empty and `force` is not set.
    """
    tokenizer = shipped_tokenizer()
    values = tiny_config_json(tokenizer, form=form, block_tokens=block_tokens, **overrides)
    config = ModelConfig.from_json(values)
    path = Path(directory)
    prepare_directory(path, force=force)
    write_checkpoint(path, values, tiny_weights(config, tokenizer, seed=seed), tokenizer.json, form=form)
    return config


def tiny_weights(config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> dict[str, Tensor]:
    """float32 tensors by name. The model hardly ever says a special token other than end-of-sequence: their logits are
    0, e² times less likely than the average word, so that random text holds no images and no turns."""
    weights = random_weights(tensor_specs(config), seed=seed)
    weights["head.weight"][sorted(tokenizer.special_ids - {config.eos_token_id})] = 0
    return weights
