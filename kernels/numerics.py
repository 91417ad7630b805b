"""What the reference kernels share: the dtype they calculate in, and tiles of rows.

A row's bits must not depend on which rows come with it. Library matrix products choose their algorithm by shape, so
the reference kernels only ever call them with one fixed number of rows, padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TILE = 8
"""Rows of every matrix product. Larger tiles are faster for long chunks, smaller ones for single decode rows."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for everything up to float32, float64 for float64: where statistics, sums and softmax happen."""
    return torch.promote_types(x.dtype, torch.float32)


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """x [rows, ...] with zero rows added up to a multiple of `multiple`; x itself if it is one and contiguous.

    A fresh tensor starts at an aligned address, and so does every tile of it: the address decides which code path a
    library takes.
    """
    rows = x.shape[0]
    if rows % multiple == 0 and x.is_contiguous() and x.data_ptr() % 64 == 0:
        return x
    padded = x.new_zeros(-(-rows // multiple) * multiple, *x.shape[1:])
    padded[:rows] = x
    return padded
