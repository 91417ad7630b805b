"""The mixture of experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whalepod.kernels.experts import dense_expert, routed_experts
from whalepod.kernels.quantise import PackedFormat
from whalepod.kernels.router import route

from .config import ModelConfig
from .projection import Weights


@dataclass(frozen=True, slots=True)
class FeedForward:
    router: Tensor
    """[experts, D]"""
    bias: Tensor
    """[experts]: takes part in the choice of text rows' experts."""
    image_bias: Tensor
    """[experts]: the same for rows of images."""
    gate_up: Tensor
    """[experts, 2 · M, D], gate rows first"""
    down: Tensor
    """[experts, D, M]"""
    shared_gate_up: Tensor
    shared_down: Tensor
    chosen: int
    factor: float
    limit: float
    input_format: PackedFormat | None

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, *, experts: int, chosen: int) -> Self:
        """`weights` below `layers.{layer}.ffn.` or a draft block's."""

        def gate_up(prefix: str) -> Tensor:
            return torch.cat((weights[f"{prefix}.w1.weight"], weights[f"{prefix}.w3.weight"]))

        return cls(
            router=weights["gate.weight"],
            bias=weights["gate.bias"],
            image_bias=weights["gate.bias_vl"],
            gate_up=torch.stack([gate_up(f"experts.{expert}") for expert in range(experts)]),
            down=torch.stack([weights[f"experts.{expert}.w2.weight"] for expert in range(experts)]),
            shared_gate_up=gate_up("shared_experts"),
            shared_down=weights["shared_experts.w2.weight"],
            chosen=chosen,
            factor=config.routed_scaling_factor,
            limit=config.swiglu_limit,
            input_format=weights.input_format,
        )

    def __call__(self, x: Tensor, text: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [rows, D], `text` [rows] bool or None for all -> output [rows, D], ids and weights [rows, chosen]."""
        bias = self.bias if text is None else torch.where(text[:, None], self.bias, self.image_bias)
        ids, weights = route(x, self.router, bias, chosen=self.chosen, factor=self.factor)
        routed = routed_experts(
            x, ids, weights, self.gate_up, self.down, limit=self.limit, input_format=self.input_format
        )
        shared = dense_expert(
            x, self.shared_gate_up, self.shared_down, limit=self.limit, input_format=self.input_format
        )
        return (routed + shared).to(x.dtype), ids, weights
