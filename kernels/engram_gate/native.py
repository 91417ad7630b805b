"""The operator of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

from .reference import MAGNITUDE_MIN

_let_in = operator("let_in")


def let_in(streams: Tensor, projected: Tensor, weight: Tensor, text: Tensor | None, *, eps: float) -> Tensor:
    streams, projected, weight = streams.contiguous(), projected.contiguous(), weight.contiguous()
    opens = None if text is None else text.contiguous()
    out, weighted = torch.empty_like(streams), streams.new_empty(streams.shape[2])
    _let_in(
        streams.data_ptr(), projected.data_ptr(), weight.data_ptr(), None if opens is None else opens.data_ptr(),
        weighted.data_ptr(), out.data_ptr(), *streams.shape, eps, MAGNITUDE_MIN,
    )  # fmt: skip
    return out
