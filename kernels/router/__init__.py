"""Choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.linear import linear
from whalepod.kernels.native import library

from . import native, reference


def route(x: Tensor, weight: Tensor, bias: Tensor, *, chosen: int, factor: float) -> tuple[Tensor, Tensor]:
    """x [rows, D], weight [experts, D], bias [experts] or [rows, experts]
    -> ids [rows, chosen] int64 in order of descending biased score, weights [rows, chosen] in at least float32.

    Scores are sqrt(softplus(x · weightᵀ)). The bias only takes part in the choice; ties go to the lower id. Weights
    are the chosen scores, normalised to sum to 1 if there is more than one, times `factor`.
    """
    assert bias.shape in (weight.shape[:1], (x.shape[0], weight.shape[0])), bias.shape
    if x.is_cuda and x.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.choose(linear(x, weight, out_dtype=torch.float32), bias, chosen=chosen, factor=factor)
    if library.takes(x, weight, bias):
        return native.choose(linear(x, weight), bias, chosen=chosen, factor=factor)
    return reference.route(x, weight, bias, chosen=chosen, factor=factor)
