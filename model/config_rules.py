"""Which configurations make sense. Every rule names the field that breaks it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whalepod.core.errors import ConfigError

if TYPE_CHECKING:
    from .config import ModelConfig


def check_config(config: ModelConfig) -> None:
    """Raise ConfigError for the first contradiction."""
    _check_supported(config)
    _check_sizes(config)
    _check_token_ids(config)
    _check_sources(config)
    _check_ratios(config)
    _check_engram(config)
    _check_drafter(config)
    _check_storage(config)
    _check_vision(config)


def last_at_or_below(layers: Sequence[int], layer: int) -> int | None:
    """Largest entry of the ascending `layers` that is <= `layer`."""
    position = bisect_right(layers, layer)
    return layers[position - 1] if position else None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"config.json: {message}")


def _check_supported(config: ModelConfig) -> None:
    """Features of relatives of this model that the network does not have."""
    only = {
        "num_key_value_heads": 1,
        "attention_bias": False,
        "q_head_norm": False,
        "tie_word_embeddings": False,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "hc_pre_from_prev_sublayer": True,
        "dspark_markov_head_type": "vanilla",
    }
    for name, value in only.items():
        _require(getattr(config, name) == value, f"{name} must be {value!r}, not {getattr(config, name)!r}")
    _require(config.n_group in (None, 1), f"n_group {config.n_group}: expert groups are not supported")
    _require(config.topk_group in (None, 1), f"topk_group {config.topk_group}: expert groups are not supported")
    _require(config.dtype in ("bfloat16", "float32"), f"dtype {config.dtype!r} must be bfloat16 or float32")
    yarn = config.rope_scaling
    _require(yarn is None or yarn.rope_type == "yarn", "rope_scaling.rope_type must be yarn")


def _check_sizes(config: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size num_hidden_layers max_position_embeddings num_attention_heads head_dim "
        "qk_rope_head_dim q_lora_rank o_lora_rank o_groups sliding_window index_n_heads index_head_dim "
        "index_topk candidate_topk_blocks candidate_block_size moe_intermediate_size n_routed_experts "
        "num_experts_per_tok n_shared_experts hc_mult hc_sinkhorn_iters rms_norm_eps hc_eps rope_theta "
        "compress_rope_theta swiglu_limit"
    )
    for name in positive.split():
        _require(getattr(config, name) > 0, f"{name} must be positive, not {getattr(config, name)}")
    rope = config.qk_rope_head_dim
    _require(rope % 2 == 0, f"qk_rope_head_dim {rope} must be even: channels rotate in pairs")
    _require(rope <= config.head_dim, f"qk_rope_head_dim {rope} exceeds head_dim {config.head_dim}")
    _require(rope <= config.index_head_dim, f"qk_rope_head_dim {rope} exceeds index_head_dim {config.index_head_dim}")
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, f"num_attention_heads {heads} is no multiple of o_groups {groups}")
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    _require(chosen <= experts, f"num_experts_per_tok {chosen} exceeds n_routed_experts {experts}")


def _check_token_ids(config: ModelConfig) -> None:
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "image_token_id",
        "engram_pad_token_id",
        "dspark_noise_token_id",
    ):
        value = getattr(config, name)
        _require(
            value is None or 0 <= value < config.vocab_size, f"{name} {value} is outside vocab_size {config.vocab_size}"
        )


def _check_sources(config: ModelConfig) -> None:
    layers = config.num_hidden_layers
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(config, name)
        _require(list(ids) == sorted(set(ids)), f"{name} {list(ids)} must ascend without repeats")
        _require(all(0 <= layer < layers for layer in ids), f"{name} {list(ids)} has a layer outside 0..{layers - 1}")
    _require(len(config.kv_source_layer_ids) > 0, "kv_source_layer_ids is empty")
    strays = set(config.kv_source_layer_ids) - set(config.index_source_layer_ids)
    _require(not strays, f"kv_source_layer_ids {sorted(strays)} are not in index_source_layer_ids")
    last = config.kv_source_layer_ids[-1]
    source = config.candidate_source_layer_id
    _require(source == last, f"candidate_source_layer_id {source} is not the last of kv_source_layer_ids ({last})")


def _check_ratios(config: ModelConfig) -> None:
    ratios, drafts = config.compress_ratios, config.num_nextn_predict_layers
    wanted = config.num_hidden_layers + drafts
    _require(len(ratios) == wanted, f"compress_ratios has {len(ratios)} entries for {wanted} layers and draft blocks")
    _require(all(ratio >= 0 for ratio in ratios), "compress_ratios has a negative entry")
    _require(not any(ratios[config.num_hidden_layers :]), "compress_ratios of draft blocks must be 0")
    for layer in config.index_source_layer_ids:
        _require(ratios[layer] > 0, f"compress_ratios[{layer}] is 0, but the layer is a KV or index source")
    for layer, ratio in enumerate(ratios[: config.num_hidden_layers]):
        if ratio == 0:
            continue
        source = last_at_or_below(config.kv_source_layer_ids, layer)
        if source is None:
            raise ConfigError(
                f"config.json: compress_ratios[{layer}] is {ratio}, but no KV source lies at or below the layer"
            )
        _require(
            ratio == ratios[source], f"compress_ratios[{layer}] is {ratio}, its KV source {source} has {ratios[source]}"
        )
        above = layer > config.kv_source_layer_ids[-1]
        _require(
            not above or ratio == 1, f"compress_ratios[{layer}] is {ratio}: above the last KV source only 0 and 1 work"
        )
    tokens = config.whalepod.block_tokens
    group = math.lcm(*(ratios[source] for source in config.kv_source_layer_ids))
    valid = tokens is None or (tokens > 0 and tokens % group == 0)
    _require(valid, f"whalepod.block_tokens {tokens} must be a positive multiple of {group}, the sources' common ratio")


def _check_engram(config: ModelConfig) -> None:
    last = config.kv_source_layer_ids[-1]
    late = [layer for layer in config.engram_layer_ids if layer > last]
    _require(not late, f"engram_layer_ids {late} lie above the last KV source {last}, where most prompt rows never run")
    rows = [layout.rows for layout in config.engram]
    stored = list(config.engram_num_embeddings)
    _require(
        rows == stored, f"engram_num_embeddings {stored} does not match the primes above engram_vocab_size, {rows}"
    )
    _require(not rows or config.engram_head_dim > 0, "engram_head_dim must be positive")


def _check_drafter(config: ModelConfig) -> None:
    if config.num_nextn_predict_layers == 0:
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        _require(getattr(config, name) > 0, f"{name} must be positive, not {getattr(config, name)}")
    chosen, experts = config.dspark_num_experts_per_tok, config.dspark_n_routed_experts
    _require(chosen <= experts, f"dspark_num_experts_per_tok {chosen} exceeds dspark_n_routed_experts {experts}")
    targets, layers = config.dspark_target_layer_ids, config.num_hidden_layers
    _require(len(targets) > 0, "dspark_target_layer_ids is empty")
    _require(
        all(0 <= layer < layers for layer in targets),
        f"dspark_target_layer_ids {list(targets)} outside 0..{layers - 1}",
    )


def _check_storage(config: ModelConfig) -> None:
    stored = config.quantization_config
    if stored is None:
        return
    _require(stored.quant_method == "fp8", f"quantization_config.quant_method {stored.quant_method!r} must be fp8")
    _require(stored.scale_fmt == "ue8m0", f"quantization_config.scale_fmt {stored.scale_fmt!r} must be ue8m0")
    _require(stored.expert_dtype == "fp4", f"quantization_config.expert_dtype {stored.expert_dtype!r} must be fp4")
    block = stored.weight_block_size
    valid = len(block) == 2 and min(block) > 0
    _require(valid, f"quantization_config.weight_block_size {list(block)} must be two positive numbers")


def _check_vision(config: ModelConfig) -> None:
    vision = config.vision_config
    if vision is None:
        return
    _require(config.image_token_id is not None, "image_token_id is missing, but there is a vision_config")
    width, heads = vision.hidden_size, vision.num_attention_heads
    valid = heads > 0 and width % heads == 0 and width // heads % 4 == 0
    _require(valid, f"vision_config.hidden_size {width} must split into {heads} heads of a multiple of 4 channels")
