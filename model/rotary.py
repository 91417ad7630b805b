"""Rotary frequencies of a kind of layer, and the angles of some rows."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from whalepod.kernels.rope import rotary_angles, rotary_factors, rotate

from .config import RopeParameters


class RotaryAngles:
    """Turns vectors at some positions, in one kind of layer."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [rows, pairs]."""
        self.cos = cos
        self.sin = sin
        self._factors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor) -> Self:
        """positions [rows] int64, frequencies [pairs]."""
        return cls(*rotary_angles(positions, frequencies))

    def rotate(self, x: Tensor) -> Tensor:
        """x [rows, ..., width] -> the same with its last 2 · pairs channels turned."""
        own, neighbour, _ = self._factors_for(x.shape[-1])
        return rotate(x, own, neighbour)

    def rotate_back(self, x: Tensor) -> Tensor:
        """Undoes `rotate`."""
        own, _, neighbour = self._factors_for(x.shape[-1])
        return rotate(x, own, neighbour)

    def _factors_for(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Own factors, and the neighbour's forwards and backwards; every layer of a forward asks for the same."""
        if width not in self._factors:
            own, neighbour = rotary_factors(self.cos, self.sin, width)
            self._factors[width] = (own, neighbour, -neighbour)
        return self._factors[width]


def rotary_frequencies(parameters: RopeParameters, dtype: torch.dtype) -> Tensor:
    """[dim / 2]: theta^(-2i / dim), slow pairs divided by `factor` (`RopeParameters`)."""
    pairs = torch.arange(0, parameters.dim, 2, dtype=torch.float32)
    frequencies = 1.0 / parameters.theta ** (pairs / parameters.dim)
    if parameters.factor == 1.0:
        return frequencies.to(dtype)
    index = torch.arange(parameters.dim // 2, dtype=torch.float32)
    slow = ((index - parameters.low) / (parameters.high - parameters.low)).clamp(0, 1)
    return (frequencies * (1 - slow) + frequencies / parameters.factor * slow).to(dtype)
