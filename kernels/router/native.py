"""The operator of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

from .reference import SUM_MIN

_route = operator("route")


def choose(logits: Tensor, bias: Tensor, *, chosen: int, factor: float) -> tuple[Tensor, Tensor]:
    """logits [rows, experts] -> ids and weights, as `route` gives them."""
    logits, bias = logits.contiguous(), bias.contiguous()
    rows, experts = logits.shape
    ids, weights = torch.empty((rows, chosen), dtype=torch.int64), logits.new_empty(rows, chosen)
    bias_step = experts if bias.ndim == 2 else 0
    _route(
        logits.data_ptr(), bias.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        rows, experts, bias_step, chosen, factor, SUM_MIN,
    )  # fmt: skip
    return ids, weights
