"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .reference import inverse_rms

__all__ = ["inverse_rms", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., width] · rsqrt(mean(x²) + eps) · weight [width]; statistics and product in at least float32, then
    rounded once to the dtype of `x`."""
    assert x.shape[-1:] == weight.shape, (x.shape, weight.shape)
    return reference.rms_norm(x, weight, eps=eps)
