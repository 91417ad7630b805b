"""What the caches' formats do to values, with gradients that pass straight through.

The values are those of `whalepod.kernels.quantise`, in elementwise steps that a compiler can fuse.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def window_rows(x: Tensor) -> Tensor:
    """x [..., width] as FP8 window records hold it: E4M3, a power of two for each 32 channels."""
    grouped = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(grouped.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX)
    values = (grouped / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return _straight_through(x, values)


def global_entries(x: Tensor) -> Tensor:
    """x [..., width] as FP4 entries hold it: E2M1, an E4M3 scale for each 16 channels."""
    grouped = x.float().unflatten(-1, (-1, 16))
    target = grouped.abs().amax(dim=-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX
    scale = target.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _straight_through(x, _e2m1(grouped / scale) * scale)


def index_keys(x: Tensor) -> Tensor:
    """x [..., width] as MXFP4 index keys hold it: E2M1, a power of two for each 32 channels."""
    grouped = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(grouped.abs().amax(dim=-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return _straight_through(x, _e2m1(grouped / scale) * scale)


def _straight_through(x: Tensor, grouped: Tensor) -> Tensor:
    return x + (grouped.flatten(-2).to(x.dtype) - x).detach()


def _power_of_two(target: Tensor) -> Tensor:
    """The smallest power of two >= target, by its exponent bits."""
    exponents = target.contiguous().view(torch.int32) + 0x7FFFFF >> 23
    return (exponents << 23).view(torch.float32)


def _e2m1(values: Tensor) -> Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; a middle goes to the even one of two codes.

    Codes count up within each of the three steps, so rounding half to even in units of the step does that."""
    size = values.abs().clamp(max=E2M1_MAX)
    fine, middle, coarse = torch.round(size * 2) / 2, torch.round(size), torch.round(size / 2) * 2
    rounded = torch.where(size < 2, fine, torch.where(size < 4, middle, coarse))
    return torch.copysign(rounded, values)
