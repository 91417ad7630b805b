"""Hyper-connections with doubly stochastic mixing, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.kernels.activation import sigmoid
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import compute_dtype

LANES = 64
"""Sinkhorn keeps rows innermost, padded to a multiple of this, so that every row takes the vectorised sum, which adds
its few terms in one order."""


class Mixes(NamedTuple):
    """Coefficients predicted from a row's streams, in at least float32."""

    pre: Tensor
    """[rows, S]: weights that collapse the streams in front of the *next* sublayer."""
    post: Tensor
    """[rows, S]: share of this sublayer's output in each stream."""
    comb: Tensor
    """[rows, S, S]: comb[i, k] carries stream i into stream k."""


def spread_scale(scale: Tensor, streams: int) -> Tensor:
    return torch.repeat_interleave(scale, torch.tensor([streams, streams, streams * streams], device=scale.device))


def predict_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> Mixes:
    flat = streams.flatten(1).to(compute_dtype(streams))
    norm = torch.rsqrt((flat * flat).mean(dim=-1, keepdim=True) + rms_eps)
    return split_mixes(linear(flat, fn) * norm, scale, base, eps=eps, iterations=iterations)


def split_mixes(values: Tensor, scale: Tensor, base: Tensor, *, eps: float, iterations: int) -> Mixes:
    # (2 + S) · S coefficients: S = sqrt(1 + count) - 1.
    count = round((1 + values.shape[1]) ** 0.5) - 1
    z = values * scale + base
    gates = sigmoid(z[:, : 2 * count])
    comb = _sinkhorn(z[:, 2 * count :].unflatten(1, (count, count)), eps=eps, iterations=iterations)
    return Mixes(pre=gates[:, :count] + eps, post=gates[:, count:] * 2, comb=comb)


def _sinkhorn(logits: Tensor, *, eps: float, iterations: int) -> Tensor:
    """logits [rows, S, S] -> softmax over the last axis, + eps, then `iterations` normalisations of each axis in turn,
    without the first of the last axis. Every denominator has + eps."""
    rows, count, _ = logits.shape
    # One more entry per axis holds eps, so that one sum gives a denominator.
    padded = logits.new_full((count + 1, count + 1, -(-rows // LANES) * LANES), eps)
    comb = padded[:count, :count]
    comb[..., :rows] = logits.permute(1, 2, 0)
    comb.sub_(comb.amax(dim=1, keepdim=True)).exp_()
    comb.div_(comb.sum(dim=1, keepdim=True)).add_(eps)
    rows_with_eps, columns_with_eps = padded[:count], padded[:, :count]
    for iteration in range(iterations):
        if iteration:
            comb.div_(rows_with_eps.sum(dim=1, keepdim=True))
        comb.div_(columns_with_eps.sum(dim=0, keepdim=True))
    return comb[..., :rows].permute(2, 0, 1).contiguous()


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    wide = streams.to(compute_dtype(streams))
    return (wide * weights[:, :, None]).sum(dim=1).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    wide = streams.to(compute_dtype(streams))
    carried = (mixes.comb[:, :, :, None] * wide[:, :, None, :]).sum(dim=1)
    return carried.add_(mixes.post[:, :, None] * y[:, None, :]).to(streams.dtype)
