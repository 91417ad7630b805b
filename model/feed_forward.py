"""The mixture of experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whalepod.kernels.experts import dense_expert
from whalepod.kernels.quantise import PackedFormat
from whalepod.kernels.router import route

from .config import ModelConfig
from .projection import Weights
from .routed_experts import ExpertShape, MakeExperts, RoutedExperts, gate_up_matrix


@dataclass(frozen=True, slots=True)
class FeedForward:
    router: Tensor
    """[experts, D]"""
    bias: Tensor
    """[experts]: takes part in the choice of text rows' experts."""
    image_bias: Tensor
    """[experts]: the same for rows of images."""
    routed: RoutedExperts
    shared_gate_up: Tensor
    shared_down: Tensor
    chosen: int
    factor: float
    limit: float
    input_format: PackedFormat | None

    @classmethod
    def from_weights(
        cls, weights: Weights, config: ModelConfig, *, experts: int, chosen: int, make_experts: MakeExperts
    ) -> Self:
        """`weights` below `layers.{layer}.ffn.` or a draft block's."""
        return cls(
            router=weights["gate.weight"],
            bias=weights["gate.bias"],
            image_bias=weights["gate.bias_vl"],
            routed=make_experts(
                weights,
                ExpertShape(
                    experts=experts,
                    chosen=chosen,
                    width=config.hidden_size,
                    inner=config.moe_intermediate_size,
                    limit=config.swiglu_limit,
                    input_format=weights.input_format,
                ),
            ),
            shared_gate_up=gate_up_matrix(weights, "shared_experts"),
            shared_down=weights["shared_experts.w2.weight"],
            chosen=chosen,
            factor=config.routed_scaling_factor,
            limit=config.swiglu_limit,
            input_format=weights.input_format,
        )

    def __call__(self, x: Tensor, text: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [rows, D], `text` [rows] bool or None for all, rows from `count` on padding
        -> output [rows, D], ids and weights [rows, chosen]."""
        bias = self.bias if text is None else torch.where(text[:, None], self.bias, self.image_bias)
        ids, weights = route(x, self.router, bias, chosen=self.chosen, factor=self.factor)
        routed = self.routed(x, ids, weights, count=count)
        shared = dense_expert(
            x, self.shared_gate_up, self.shared_down, limit=self.limit, input_format=self.input_format
        )
        return (routed + shared).to(x.dtype), ids, weights
