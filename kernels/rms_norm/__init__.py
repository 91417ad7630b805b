"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native import library
from whalepod.kernels.quantise import FP8_BLOCK32

from . import native, reference
from .reference import inverse_rms

__all__ = ["inverse_rms", "rms_norm", "rms_norm_fp8"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., width] · rsqrt(mean(x²) + eps) · weight [width]; statistics and product in at least float32, then
    rounded once to the dtype of `x`."""
    assert x.shape[-1:] == weight.shape, (x.shape, weight.shape)
    if x.is_cuda and x.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps=eps)
    if library.takes(x, weight):
        return native.rms_norm(x, weight, eps=eps)
    return reference.rms_norm(x, weight, eps=eps)


def rms_norm_fp8(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm`, and with it what an FP8 matrix product takes of the result: E4M3 codes [..., width] and the exponent
    bytes of their powers of two [..., width / 32], both uint8, as `FP8_BLOCK32` packs them. Width a multiple of 32."""
    assert x.shape[-1:] == weight.shape and x.shape[-1] % 32 == 0, (x.shape, weight.shape)
    if x.is_cuda and x.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.rms_norm_fp8(x, weight, eps=eps)
    out = reference.rms_norm(x, weight, eps=eps)
    records = FP8_BLOCK32.encode(out)
    return out, records[..., : x.shape[-1]], records[..., x.shape[-1] :]
