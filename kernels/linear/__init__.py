"""Matrix products of activations with weights, one result per row whatever the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native import library

from . import cuda, native, reference


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [rows, in], weight [out, in] -> x · weightᵀ [rows, out], accumulated in at least float32.

    The result has the dtype of `x` unless `out_dtype` says otherwise. Bit-equal per row for any number of rows, but in
    bfloat16 on a GPU, where the library chooses how it sums by their number.
    """
    assert (x.ndim, x.shape[-1]) == (2, weight.shape[1]), (x.shape, weight.shape)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return cuda.linear(x, weight, out_dtype=out_dtype or x.dtype)
    if out_dtype in (None, torch.float32) and library.takes(x, weight):
        return native.linear(x, weight)
    return reference.linear(x, weight, out_dtype=out_dtype or x.dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, groups, in], weight [groups, out, in] -> [rows, groups, out]: one matrix per group of channels."""
    assert x.shape[1:] == weight.shape[::2], (x.shape, weight.shape)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return cuda.grouped_linear(x, weight)
    if library.takes(x, weight):
        return native.grouped_linear(x, weight)
    return reference.grouped_linear(x, weight)
