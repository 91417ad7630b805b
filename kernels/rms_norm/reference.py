"""Root-mean-square normalisation, plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
