"""Rotary frequencies of a kind of layer, and the angles of the rows of one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.rope import rotary_angles, rotate

from .config import RopeParameters


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Angles of some positions, in one kind of layer."""

    cos: Tensor
    """[rows, pairs]"""
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """x [rows, ..., width] -> the same with its last channels turned."""
        return rotate(x, self.cos, self.sin)

    def rotate_back(self, x: Tensor) -> Tensor:
        return rotate(x, self.cos, self.sin, inverse=True)

    def select(self, rows: Tensor) -> RotaryAngles:
        return RotaryAngles(self.cos[rows], self.sin[rows])


def angles_at(positions: Tensor, frequencies: Tensor) -> RotaryAngles:
    """positions [rows] int64."""
    return RotaryAngles(*rotary_angles(positions, frequencies))


def rotary_frequencies(parameters: RopeParameters, dtype: torch.dtype) -> Tensor:
    """[dim / 2]: theta^(-2i / dim), slow pairs divided by `factor` (`spec/model.md` §2.5)."""
    pairs = torch.arange(0, parameters.dim, 2, dtype=torch.float32)
    frequencies = 1.0 / parameters.theta ** (pairs / parameters.dim)
    if parameters.factor == 1.0:
        return frequencies.to(dtype)
    index = torch.arange(parameters.dim // 2, dtype=torch.float32)
    slow = ((index - parameters.low) / (parameters.high - parameters.low)).clamp(0, 1)
    return (frequencies * (1 - slow) + frequencies / parameters.factor * slow).to(dtype)
