"""The operator of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

_rms_norm = operator("rms_norm")


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out, width = torch.empty_like(x), weight.shape[0]
    _rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width if width else 0, width, eps)
    return out
