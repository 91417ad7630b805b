"""How far each residual stream lets a remembered n-gram in."""

from __future__ import annotations

from torch import Tensor

from . import reference


def engram_gate(streams: Tensor, keys: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """streams, keys [rows, S, D], weight [S, D] (query weight · key weight) -> gates [rows, S] in at least float32.

    sigmoid of the signed square root of the scaled dot product of both, each normalised by its own root mean square;
    the magnitude under the root is at least 1e-6, and 0 counts as positive.
    """
    assert streams.shape == keys.shape, (streams.shape, keys.shape)
    assert weight.shape == streams.shape[1:], (streams.shape, weight.shape)
    return reference.engram_gate(streams, keys, weight, eps=eps)
