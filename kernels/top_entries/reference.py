"""The best visible entries of each row, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.indexer import select_top


def top_entries(scores: Tensor, visible: Tensor, *, count: int) -> Tensor:
    allowed = torch.arange(scores.shape[1], device=scores.device) < visible[:, None]
    return select_top(scores, allowed, count=count).int()
