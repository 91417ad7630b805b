"""The gate in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.activation import sigmoid
from whalepod.kernels.numerics import compute_dtype

MAGNITUDE_MIN = 1e-6


def engram_gate(streams: Tensor, keys: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    dtype = compute_dtype(streams)
    queries, keys = streams.to(dtype), keys.to(dtype)
    norms = torch.rsqrt((queries * queries).mean(dim=-1) + eps) * torch.rsqrt((keys * keys).mean(dim=-1) + eps)
    dots = (queries * weight * keys).sum(dim=-1) * norms * streams.shape[-1] ** -0.5
    roots = torch.sqrt(dots.abs().clamp(min=MAGNITUDE_MIN))
    return sigmoid(torch.where(dots < 0, -roots, roots))
