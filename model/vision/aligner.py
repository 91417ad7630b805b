"""From the tower's features to rows of the text network's width (`model.md` §8.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.model.projection import Weights

from .grid import ImageGrid
from .tower import Affine


@dataclass(frozen=True, slots=True)
class Aligner:
    inner: Affine
    outer: Affine
    ratio: int
    """Patches of a cell, along each side."""

    @classmethod
    def from_weights(cls, weights: Weights, *, ratio: int) -> Self:
        """`weights` below `aligner.`."""
        return cls(Affine.from_weights(weights, "w1"), Affine.from_weights(weights, "w2"), ratio)

    def __call__(self, features: Sequence[Tensor], grids: Sequence[ImageGrid]) -> list[Tensor]:
        """features [patches, width] of each image -> [rows · columns, D], in reading order."""
        cells = [self._cells(*one) for one in zip(features, grids, strict=True)]
        rows = self.outer(functional.gelu(self.inner(torch.cat(cells))))
        return list(rows.split([len(each) for each in cells]))

    def _cells(self, features: Tensor, grid: ImageGrid) -> Tensor:
        """[rows · columns, width · ratio²]: a cell's channels, each with its places row by row; zeros beyond the
        image's right and bottom."""
        ratio = self.ratio
        image = features.view(grid.patch_rows, grid.patch_columns, -1)
        right, bottom = grid.columns * ratio - grid.patch_columns, grid.rows * ratio - grid.patch_rows
        padded = functional.pad(image, (0, 0, 0, right, 0, bottom))
        split = padded.view(grid.rows, ratio, grid.columns, ratio, -1)
        return split.permute(0, 2, 4, 1, 3).reshape(grid.rows * grid.columns, -1)
