"""Root-mean-square normalisation, plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import narrow, widen


def inverse_rms(x: Tensor, *, eps: float) -> Tensor:
    """x [..., width] in float32 or wider -> 1 / sqrt(mean(x²) + eps) [..., 1]."""
    return torch.rsqrt((x * x).sum(dim=-1, keepdim=True).div_(x.shape[-1]).add_(eps))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = widen(x)
    return narrow(wide * inverse_rms(wide, eps=eps) * weight, x.dtype)
