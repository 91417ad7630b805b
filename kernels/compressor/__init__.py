"""Pooling of a group of consecutive tokens into one entry of global KV."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference


def pool_groups(values: Tensor, scores: Tensor) -> Tensor:
    """values, scores [groups, ratio, width] -> [groups, width]: per channel, values weighted by the softmax of the
    scores over the group's tokens."""
    assert values.shape == scores.shape, (values.shape, scores.shape)
    if library.takes(values, scores):
        return native.pool_groups(values, scores)
    return reference.pool_groups(values, scores)
