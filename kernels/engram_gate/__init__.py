"""How far each residual stream lets a remembered n-gram in."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference


def engram_gate(streams: Tensor, keys: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """streams, keys [rows, S, D], weight [S, D] (query weight · key weight) -> gates [rows, S] in at least float32.

    sigmoid of the signed square root of the scaled dot product of both, each normalised by its own root mean square;
    the magnitude under the root is at least 1e-6, and 0 counts as positive.
    """
    assert streams.shape == keys.shape, (streams.shape, keys.shape)
    assert weight.shape == streams.shape[1:], (streams.shape, weight.shape)
    return reference.engram_gate(streams, keys, weight, eps=eps)


def let_in(streams: Tensor, projected: Tensor, weight: Tensor, text: Tensor | None, *, eps: float) -> Tensor:
    """Add to each stream what its gate lets in: streams [rows, S, D], projected [rows, (S + 1) · D] (S keys, then one
    value), weight [S, D] -> [rows, S, D]. `text` [rows] bool: rows whose gates open at all; None: every row."""
    rows, count, width = streams.shape
    assert projected.shape == (rows, (count + 1) * width), (streams.shape, projected.shape)
    if streams.is_cuda and streams.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.let_in(streams, projected, weight, text, eps=eps)
    if library.takes(streams, projected, weight):
        return native.let_in(streams, projected, weight, text, eps=eps)
    return reference.let_in(streams, projected, weight, text, eps=eps)
