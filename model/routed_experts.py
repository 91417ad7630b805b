"""The routed experts of one layer: all of them in this process, or whatever a rank of an expert-parallel group puts in
their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from whalepod.kernels.experts import routed_experts
from whalepod.kernels.quantise import PackedFormat

from .projection import Weights


class RoutedExperts(Protocol):
    """Σ_k weights_k · expert_k(x), summed in the order of the choices."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, count: int) -> Tensor:
        """x [rows, D], ids and weights [rows, chosen] -> [rows, D] in at least float32. Rows from `count` on are
        padding: what comes of them does not matter, but it must be finite."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What a layer's experts have in common."""

    experts: int
    chosen: int
    """Experts of a row."""
    width: int
    """D"""
    inner: int
    """M"""
    limit: float
    input_format: PackedFormat | None


MakeExperts = Callable[[Weights, ExpertShape], RoutedExperts]
"""(weights below `layers.{layer}.ffn.` or a draft block's, shape) -> the layer's experts. Called in the order in which
a forward uses the layers, draft blocks last."""


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """Every expert here."""

    gate_up: Tensor
    """[experts, 2 · M, D], gate rows first"""
    down: Tensor
    """[experts, D, M]"""
    limit: float
    input_format: PackedFormat | None

    @classmethod
    def from_weights(cls, weights: Weights, shape: ExpertShape) -> Self:
        gate_up, down = stack_experts(weights, shape, range(shape.experts))
        return cls(gate_up=gate_up, down=down, limit=shape.limit, input_format=shape.input_format)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, count: int) -> Tensor:  # noqa: ARG002  padding comes out finite
        return routed_experts(
            x, ids, weights, self.gate_up, self.down, limit=self.limit, input_format=self.input_format
        )


def gate_up_matrix(weights: Weights, prefix: str) -> Tensor:
    """[2 · M, D] of one expert, gate rows first."""
    return torch.cat((weights[f"{prefix}.w1.weight"], weights[f"{prefix}.w3.weight"]))


def stack_experts(weights: Weights, shape: ExpertShape, experts: Iterable[int]) -> tuple[Tensor, Tensor]:
    """gate_up [experts, 2 · M, D] and down [experts, D, M] of some experts, perhaps of none, in this order."""
    chosen = list(experts)
    if not chosen:
        router = weights["gate.weight"]
        return router.new_empty(0, 2 * shape.inner, shape.width), router.new_empty(0, shape.width, shape.inner)
    gate_up = torch.stack([gate_up_matrix(weights, f"experts.{expert}") for expert in chosen])
    return gate_up, torch.stack([weights[f"experts.{expert}.w2.weight"] for expert in chosen])
