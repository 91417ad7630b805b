"""The configuration of the model that ships: every part of the released one, small enough for a repository.

Layer roles: a window-only layer with nothing else; sources of ratio 2 at layers 1 and 3, each with an n-gram table in
front; the last source, of ratio 1, at layer 4, which publishes candidate blocks; an index source above it that may
only choose among them. Half of the layers run on the kept rows of a prompt only, as in the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalepod.model.checkpoint_writer import WeightFormat
from whalepod.model.tiny_checkpoint import SMALLEST, tiny_config_json
from whalepod.model.tokenizer import Tokenizer

TRAINED: Mapping[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 8,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 48,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "index_n_heads": 4,
    "candidate_source_layer_id": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 10.0,
    "sliding_window": 64,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 1500,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_n_routed_experts": 4,
}
"""What differs from the random tiny model. 7.4 M parameters, 15.5 MB in bfloat16. Candidates exclude entries from 257
tokens on (32 blocks of 8), selections (64) earlier."""

SMOKE: Mapping[str, Any] = {
    **SMALLEST,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "num_nextn_predict_layers": 2,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "engram_head_dim": 32,
    "swiglu_limit": 10.0,
    "dspark_markov_rank": 16,
    "index_n_heads": 2,
}
"""The same roles in a model that a CPU trains in seconds."""

SIZES: Mapping[str, tuple[Mapping[str, Any], int]] = {"shipped": (TRAINED, 64), "smoke": (SMOKE, 16)}
"""Text fields and block tokens of each size that can be trained."""


def trained_config_json(tokenizer: Tokenizer, *, size: str = "shipped") -> dict[str, Any]:
    """`config.json` of the trained model of `size`."""
    overrides, block_tokens = SIZES[size]
    return tiny_config_json(tokenizer, form=WeightFormat.BFLOAT16, block_tokens=block_tokens, **overrides)
