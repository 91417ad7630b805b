"""Exact choice of the best visible entries, ties to the lower entry."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback

from . import reference

__all__ = ["top_entries"]


def top_entries(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    """scores [rows, entries], visible [rows] int32 -> [rows, count] int32: the best of entries 0 … visible - 1 of each
    row, ascending, then -1. Ties go to the lower entry; +0 and -0 tie. Scores from visible on may be anything; no score
    is NaN."""
    assert visible.shape == scores.shape[:1], (scores.shape, visible.shape)
    if not scores.is_cuda:
        return reference.top_entries(scores, visible, count=count)
    if scores.dtype != torch.float32 or count & (count - 1):
        note_fallback("top_entries", f"scores are {scores.dtype}, count {count}")
        return reference.top_entries(scores, visible, count=count)
    from .triton_kernel import top_entries as on_gpu

    return on_gpu(scores, visible, count=count)
