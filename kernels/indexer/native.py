"""The operators of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

_index_scores, _select_top = operator("index_scores"), operator("select_top")
_candidate_mask = operator("candidate_mask")


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    queries, weights, keys = queries.contiguous(), weights.contiguous(), keys.contiguous()
    out = queries.new_empty(queries.shape[0], keys.shape[0])
    _index_scores(
        queries.data_ptr(), weights.data_ptr(), keys.data_ptr(), out.data_ptr(), *queries.shape, keys.shape[0]
    )  # fmt: skip
    return out


def candidate_mask(scores: Tensor, visible: Tensor, *, block: int, top_blocks: int) -> Tensor:
    scores, visible = scores.contiguous(), visible.to(torch.int64).contiguous()
    mask = torch.empty(scores.shape, dtype=torch.bool)
    _candidate_mask(scores.data_ptr(), visible.data_ptr(), mask.data_ptr(), *scores.shape, block, top_blocks)
    return mask


def select_top(scores: Tensor, allowed: Tensor, *, count: int) -> Tensor:
    scores, allowed = scores.contiguous(), allowed.contiguous()
    selected = torch.empty((scores.shape[0], count), dtype=torch.int64)
    _select_top(scores.data_ptr(), allowed.data_ptr(), selected.data_ptr(), *scores.shape, count)
    return selected
