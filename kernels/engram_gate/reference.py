"""The gate in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.activation import sigmoid
from whalepod.kernels.numerics import widen
from whalepod.kernels.rms_norm import inverse_rms

MAGNITUDE_MIN = 1e-6


def engram_gate(streams: Tensor, keys: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    queries, keys = widen(streams), widen(keys)
    norms = (inverse_rms(queries, eps=eps) * inverse_rms(keys, eps=eps)).squeeze(-1)
    dots = (queries * weight * keys).sum(dim=-1) * norms * streams.shape[-1] ** -0.5
    roots = torch.sqrt(dots.abs().clamp(min=MAGNITUDE_MIN))
    return sigmoid(torch.where(dots < 0, -roots, roots))


def let_in(streams: Tensor, projected: Tensor, weight: Tensor, text: Tensor | None, *, eps: float) -> Tensor:
    rows, count, width = streams.shape
    keys, value = projected[:, : count * width].view(rows, count, width), projected[:, count * width :]
    gates = engram_gate(streams, keys, weight, eps=eps)
    if text is not None:
        gates = gates * text[:, None]
    return (streams + gates[:, :, None] * value[:, None, :]).to(streams.dtype)
