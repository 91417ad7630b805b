"""The operator of `operators.c`."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native.library import operator

_pool_groups = operator("pool_groups")


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    values, scores = values.contiguous(), scores.contiguous()
    groups, ratio, width = values.shape
    out = values.new_empty(groups, width)
    _pool_groups(values.data_ptr(), scores.data_ptr(), out.data_ptr(), groups, ratio, width)
    return out
