"""The router, all in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.activation import softplus
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import wide_dtype

SUM_MIN = 1e-20
"""Added to the sum of the chosen scores, which could be 0."""


def route(x: Tensor, weight: Tensor, bias: Tensor, *, chosen: int, factor: float) -> tuple[Tensor, Tensor]:
    scores = torch.sqrt(softplus(linear(x, weight, out_dtype=wide_dtype(x.dtype))))
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :chosen]
    weights = scores.gather(1, ids)
    if chosen > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SUM_MIN)
    return ids, weights * factor
