"""Weights as the network's parts take them from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.linear import linear
from whalepod.kernels.quantise import PackedFormat, round_trip


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix that rows are multiplied with."""

    weight: Tensor
    """[out, in]"""
    input_format: PackedFormat | None = None
    """What the rows are rounded to first, as the released model does in front of its quantised matrices."""

    def __call__(self, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return self.of_prepared(self.prepare(x), out_dtype=out_dtype)

    def of_prepared(self, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [rows, in], rounded as `prepare` rounds -> [rows, out]."""
        return linear(x, self.weight, out_dtype=out_dtype)

    def prepare(self, x: Tensor) -> Tensor:
        return x if self.input_format is None else round_trip(x, self.input_format)

    def above(self, other: Projection) -> tuple[Projection, Projection, Projection]:
        """The matrices of this and of another one, that take the same input, one below the other: both in one, and
        each of them, which lies in it."""
        assert self.input_format == other.input_format, (self.input_format, other.input_format)
        both, outputs = torch.cat((self.weight, other.weight)), self.weight.shape[0]
        return (
            Projection(both, self.input_format),
            Projection(both[:outputs], self.input_format),
            Projection(both[outputs:], self.input_format),
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors below one prefix of a checkpoint's names."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    input_format: PackedFormat | None = None
    """What the inputs of matrices that a quantised checkpoint stores in FP8 or FP4 are rounded to."""

    def below(self, prefix: str) -> Weights:
        return Weights(self.tensors, self.prefix + prefix, self.input_format)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def projection(self, name: str) -> Projection:
        """A matrix that quantised checkpoints store in FP8 or FP4."""
        return Projection(self[f"{name}.weight"], self.input_format)

    def plain_projection(self, *names: str) -> Projection:
        """Matrices that are never quantised, one below the other."""
        matrices = [self[f"{name}.weight"] for name in names]
        return Projection(torch.cat(matrices) if len(matrices) > 1 else matrices[0])
