"""The trained tensors: the released names, with a layer's experts stacked so that one product computes them all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.model.config import ModelConfig
from whalepod.model.random_weights import random_weights
from whalepod.model.tensor_layout import Part, tensor_specs

_EXPERT = re.compile(r"(.*\.ffn)\.(?:experts\.(\d+)|shared_experts)\.(w[123])\.weight")
SHARED = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one layer or draft block, by the rest of their names."""

    tensors: Mapping[str, Tensor]
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by released name -> the same with `….ffn.w1` [experts + 1, M, D], `w3` and `w2` [experts + 1, D, M] for
    the matrices of routed experts; the shared expert comes last."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            number = SHARED if match[2] is None else int(match[2])
            experts.setdefault(f"{match[1]}.{match[3]}", {})[number] = tensor
    for name, matrices in experts.items():
        found[name] = torch.stack([matrices[number] for number in (*range(len(matrices) - 1), SHARED)])
    return found


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `stacked`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, matrix = name.rpartition(".")
        if not prefix.endswith(".ffn") or matrix not in ("w1", "w2", "w3"):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor[:-1]):
            found[f"{prefix}.experts.{number}.{matrix}.weight"] = expert
        found[f"{prefix}.shared_experts.{matrix}.weight"] = tensor[-1]
    return found


def first_tensors(config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """What training starts from, float32 by released name. Vision, which is not trained, stays random."""
    tensors = random_weights(tensor_specs(config), seed=seed)
    for spec in tensor_specs(config):
        if spec.part is not Part.VISION:
            tensors[spec.name] = _first(spec.name, tensors[spec.name])
    for layer in range(config.num_hidden_layers):
        _first_mixing(tensors, f"layers.{layer}.", layer, config)
    for block in range(config.num_nextn_predict_layers):
        _first_mixing(tensors, f"mtp.{block}.", block, config)
    return tensors


# Names end in these: the spread of an output whose inputs have spread 1. Projections onto the streams start small.
_GAINS = {
    "head.weight": 0.3,
    "attn.wo_b.weight": 0.2,
    "ffn.gate.weight": 1.0,
    "engram.wkv.weight": 0.5,
    ".w2.weight": 0.3,
    "confidence_head.proj.weight": 0.1,
}
_SPREADS = {"embed.weight": 0.3, "engram.embed.weight": 0.3}


def _first(name: str, drawn: Tensor) -> Tensor:
    """`drawn`, a random tensor, with the mean and spread that training wants."""
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones_like(drawn)
    if name.endswith(("gate.bias", "gate.bias_vl", "attn_sink")):
        return torch.zeros_like(drawn)
    unit = drawn / drawn.std().clamp(min=1e-8) if drawn.numel() > 1 else drawn
    spread = next((spread for ending, spread in _SPREADS.items() if name.endswith(ending)), None)
    if spread is not None:
        return unit * spread
    gain = next((gain for ending, gain in _GAINS.items() if name.endswith(ending)), 1.0)
    return unit * gain / math.sqrt(drawn.shape[-1])


def _first_mixing(tensors: dict[str, Tensor], prefix: str, layer: int, config: ModelConfig) -> None:
    """Streams that keep what they hold, each sublayer reading and writing one of them more than the others, so that
    they do not stay equal."""
    count = config.hc_mult
    for place, sublayer in enumerate(("attn", "ffn")):
        base = torch.zeros(count * (count + 2))
        base[:count] = -1.4
        base[(2 * layer + place + 1) % count] = 0.3
        base[count : 2 * count] = -0.5
        base[count + (2 * layer + place) % count] = 0.7
        base[2 * count :] = (4 * torch.eye(count)).flatten()
        tensors[f"{prefix}hc_{sublayer}_base"] = base
        tensors[f"{prefix}hc_{sublayer}_scale"] = torch.full((3,), 0.1)


def parts(names: Iterable[str], config: ModelConfig) -> dict[Part, list[str]]:
    """Stacked names by the part of the model that they belong to."""
    vision = {spec.name for spec in tensor_specs(config) if spec.part is Part.VISION}
    found: dict[Part, list[str]] = {part: [] for part in Part}
    for name in names:
        part = Part.VISION if name in vision else Part.DRAFT if name.startswith("mtp.") else Part.TEXT
        found[part].append(name)
    return found
