"""The operator of `operators.c`."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native.library import operator

_linear = operator("linear")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    _linear(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], 1, x.shape[1], weight.shape[0])
    return out


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    rows, groups, width = x.shape
    outs = weight.shape[1]
    out = x.new_empty(rows, groups, outs)
    _linear(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, groups, width, outs)
    return out
