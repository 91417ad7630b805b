"""Networks of other shapes than the golden checkpoint's equal the plain second version of the specification."""

from __future__ import annotations

import pytest
import torch

from tests.model.network_world import PLAIN64, Sequences, Weights, golden_config, random_prompt
from tests.model.plain_network import PlainNetwork
from whalepod.model.config import ModelConfig

SMALL: dict[str, object] = {
    "vocab_size": 64,
    "image_token_id": 60,
    "dspark_noise_token_id": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "index_topk": 4,
    "num_nextn_predict_layers": 0,
    "engram_layer_ids": [],
    "dspark_target_layer_ids": [],
}
ENGRAM: dict[str, object] = {"engram_vocab_size": 20, "engram_head_dim": 4, "engram_compressed_vocab_size": 40}

CONFIGURATIONS: dict[str, dict[str, object]] = {
    "ratio 4 below ratio 1": {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 4, 4, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 3,
    },
    "ratios 4 and 2, an index source between them": {
        "num_hidden_layers": 7,
        "compress_ratios": [4, 4, 4, 2, 2, 1, 1],
        "kv_source_layer_ids": [0, 3, 5],
        "index_source_layer_ids": [0, 2, 3, 4, 5, 6],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
    },
    "one source of ratio 3, which is the last": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 3, 0, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": 1,
        "sliding_window": 1,
    },
    "n-gram memory at layer 0 and at a source": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 2, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [0, 2],
        "engram_max_ngram_size": 3,
        "hc_mult": 3,
        "n_shared_experts": 2,
        "num_experts_per_tok": 1,
        **ENGRAM,
    },
}


def configuration(name: str) -> ModelConfig:
    return golden_config(**(SMALL | CONFIGURATIONS[name]))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_equal_the_specifications(name: str) -> None:
    weights = Weights.draw(configuration(name))
    prompt = random_prompt(23, below=60)
    wanted = PlainNetwork(weights.config, weights.tensors, weights.token_map).logits(prompt)
    chunked = Sequences(weights.network(torch.float64), [prompt], PLAIN64)
    for rows in (3, 1, 6, 2, 1, 10):
        chunked.step({0: rows})
    torch.testing.assert_close(chunked.all_logits(0), wanted, atol=1e-6, rtol=0)
