"""The operator of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

_attention = operator("attention")


def sink_attention(queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, *, scale: float) -> Tensor:
    queries, keys, valid, sink = queries.contiguous(), keys.contiguous(), valid.contiguous(), sink.contiguous()
    rows, heads, width = queries.shape
    out = torch.empty_like(queries)
    _attention(
        queries.data_ptr(), keys.data_ptr(), valid.data_ptr(), sink.data_ptr(), out.data_ptr(),
        rows, heads, valid.shape[1], width, scale,
    )  # fmt: skip
    return out
