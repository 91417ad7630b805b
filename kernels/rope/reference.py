"""Rotation of interleaved channel pairs, as two products and a sum over whole tails."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import compute_dtype


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    return torch.cos(angles), torch.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    dtype = compute_dtype(x)
    shape = (x.shape[0], *[1] * (x.ndim - 2), cos.shape[1], 1)
    width = 2 * cos.shape[1]
    pairs = x[..., -width:].to(dtype).unflatten(-1, (-1, 2))
    turn = torch.stack((sin, -sin) if inverse else (-sin, sin), dim=-1)
    turned = pairs * cos.view(shape) + pairs.flip(-1) * turn.view(*shape[:-1], 2)
    return torch.cat((x[..., :-width], turned.flatten(-2).to(x.dtype)), dim=-1)
