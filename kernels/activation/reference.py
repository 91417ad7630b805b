"""Activation functions built from `exp` and `log1p`.

torch's own sigmoid, silu and softplus use one approximation for whole vectors and another for the elements left over,
so an element's bits would depend on the size of the batch. Its `exp` and `log1p` do not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), elementwise."""
    return torch.exp(-x).add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), elementwise."""
    return x / torch.exp(-x).add_(1)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), elementwise, without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, -limit, limit): the gate is clamped above only."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
