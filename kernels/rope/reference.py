"""Rotation of interleaved channel pairs, as two products and a sum over whole vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import narrow, widen


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.to(frequencies.dtype)[:, None] * frequencies
    return torch.cos(angles), torch.sin(angles)


def rotary_factors(cos: Tensor, sin: Tensor, width: int) -> tuple[Tensor, Tensor]:
    still = width - 2 * cos.shape[1]
    own = torch.cat((cos.new_ones(cos.shape[0], still), cos.repeat_interleave(2, dim=1)), dim=1)
    turning = torch.stack((-sin, sin), dim=-1).flatten(1)
    return own, torch.cat((sin.new_zeros(sin.shape[0], still), turning), dim=1)


def rotate(x: Tensor, own: Tensor, neighbour: Tensor) -> Tensor:
    wide = widen(x)
    if x.ndim > 2:
        shape = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
        own, neighbour = own.view(shape), neighbour.view(shape)
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).view(wide.shape)
    return narrow((wide * own).add_(swapped.mul_(neighbour)), x.dtype)
