"""The operator of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

_rotate = operator("rotate")


def rotate(x: Tensor, own: Tensor, neighbour: Tensor) -> Tensor:
    x, own, neighbour = x.contiguous(), own.contiguous(), neighbour.contiguous()
    out = torch.empty_like(x)
    rows, width = own.shape
    vectors = x.numel() // (rows * width) if rows else 0
    _rotate(x.data_ptr(), own.data_ptr(), neighbour.data_ptr(), out.data_ptr(), rows, vectors, width)
    return out
