"""Checks that a kernel gives every row the same bits alone, in any batch and in any order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 64
BATCHES = (1, 2, 7, 8, 9, 33, ROWS)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows_that_differ(kernel: Callable[..., Tensor], *inputs: Tensor) -> int:
    """How many rows of `kernel(*inputs)`, over all batches tried, have other bits than in one batch of all rows.

    Every input has ROWS rows; batches are slices and a permutation.
    """
    together = kernel(*inputs)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    different = rows_with_other_bits(kernel(*[x[order] for x in inputs]), together[order])
    for count in BATCHES:
        for start in range(0, ROWS - count + 1, max(1, (ROWS - count) // 5)):
            rows = slice(start, start + count)
            different += rows_with_other_bits(kernel(*[x[rows].clone() for x in inputs]), together[rows])
    return different


def rows_with_other_bits(got: Tensor, wanted: Tensor) -> int:
    assert got.shape == wanted.shape
    return int((got != wanted).flatten(1).any(dim=1).sum())
