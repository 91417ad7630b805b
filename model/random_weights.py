"""Random weights that behave: residual streams keep their size over the layers, selections and routes differ between
tokens, logits have a standard deviation of about 2."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .tensor_layout import TensorSpec

# Names end in these; the first match counts. A gain is the spread of an output whose inputs have spread 1: weights are
# drawn with gain / sqrt(inputs). What writes to the residual streams gets a small one.
_GAINS = {
    "vision.patch_embed.proj.weight": 1.0,
    "head.weight": 2.0,
    "markov_head.head.weight": 1.5,
    "attn.wq_b.weight": 1.5,
    "attn.indexer.wq_b.weight": 1.5,
    "attn.wo_b.weight": 0.15,
    "attn.compressor.wgate.weight": 2.0,
    "ffn.gate.weight": 3.0,
    "engram.wkv.weight": 0.5,
    ".w1.weight": 1.3,
    ".w3.weight": 1.3,
    ".w2.weight": 0.15,
}
# (mean, spread) of tensors that are no matrices of a product.
_VALUES = {
    "markov_head.embed.weight": (0.0, 1.0),
    "engram.embed.weight": (0.0, 1.0),
    "embed.weight": (0.0, 0.5),
    "norm.weight": (1.0, 0.1),
    "norm1.weight": (1.0, 0.1),
    "norm2.weight": (1.0, 0.1),
    "engram.q_weight": (1.0, 0.2),
    "engram.k_weight": (1.0, 0.2),
    "attn_sink": (0.0, 1.0),
    "hc_attn_base": (0.0, 0.5),
    "hc_ffn_base": (0.0, 0.5),
    "hc_attn_scale": (0.9, 0.2),
    "hc_ffn_scale": (0.9, 0.2),
    "ffn.gate.bias": (0.0, 0.2),
    "ffn.gate.bias_vl": (0.0, 0.4),
    ".bias": (0.0, 0.1),
    "image_start": (0.0, 0.5),
    "image_end": (0.0, 0.5),
    "image_newline": (0.0, 0.5),
}


def random_weights(specs: Iterable[TensorSpec], *, seed: int) -> dict[str, Tensor]:
    """float32 tensors by name. A tensor depends on the seed, its name and its shape only."""
    return {spec.name: _draw(spec, seed) for spec in specs}


def _draw(spec: TensorSpec, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    mean, spread = _distribution(spec)
    return torch.randn(spec.shape, generator=generator) * spread + mean


def _distribution(spec: TensorSpec) -> tuple[float, float]:
    for ending, values in _VALUES.items():
        if spec.name.endswith(ending):
            return values
    gain = next((gain for ending, gain in _GAINS.items() if spec.name.endswith(ending)), 1.0)
    return 0.0, gain / math.sqrt(spec.shape[-1])
