"""Hyper-connections with doubly stochastic mixing, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.kernels.activation import sigmoid
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import narrow, widen
from whalepod.kernels.rms_norm import inverse_rms

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
    pre, post, comb = scale
    return torch.cat((pre.expand(streams), post.expand(streams), comb.expand(streams * streams)))


def predict_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> Mixes:
    flat = widen(streams.flatten(1))
    values = linear(flat, fn).mul_(inverse_rms(flat, eps=rms_eps))
    return split_mixes(values, scale, base, eps=eps, iterations=iterations)


def split_mixes(values: Tensor, scale: Tensor, base: Tensor, *, eps: float, iterations: int) -> Mixes:
    # (2 + S) · S coefficients: S = sqrt(1 + count) - 1.
    count = round((1 + values.shape[1]) ** 0.5) - 1
    z = (values * scale).add_(base)
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
    over_outputs, over_inputs = padded[:count], padded[:, :count]
    output_sums, input_sums = padded.new_empty(count, 1, padded.shape[2]), padded.new_empty(1, count, padded.shape[2])
    for iteration in range(iterations):
        if iteration:
            comb.div_(torch.sum(over_outputs, dim=1, keepdim=True, out=output_sums))
        comb.div_(torch.sum(over_inputs, dim=0, keepdim=True, out=input_sums))
    return comb[..., :rows].permute(2, 0, 1).contiguous()


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    return narrow((widen(streams) * weights.unsqueeze(2)).sum(dim=1), streams.dtype)


def expand(y: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    carried = (mixes.comb.unsqueeze(3) * widen(streams).unsqueeze(2)).sum(dim=1)
    return narrow(carried.add_(mixes.post.unsqueeze(2) * y.unsqueeze(1)), streams.dtype)
