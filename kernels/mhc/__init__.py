"""Residual streams: predicting how they mix, collapsing them into a sublayer's input, expanding its output."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native import library
from whalepod.kernels.numerics import tile_rows

from . import native, reference
from .reference import Mixes

__all__ = ["Mixes", "collapse", "expand", "predict_mixes", "prepare_weights", "split_mixes", "spread_scale"]


TILE_ON_GPU = 64


def spread_scale(scale: Tensor, streams: int) -> Tensor:
    """scale [3], of pre, post and comb -> [(2 + streams) · streams], one factor per predicted coefficient."""
    assert scale.shape == (3,), scale.shape
    return reference.spread_scale(scale, streams)


def prepare_weights(fn: Tensor) -> Tensor:
    """fn [(2 + S) · S, S · D] float32 -> what `predict_mixes` takes of it: on a GPU two bfloat16 numbers of each weight
    [2, (2 + S) · S, S · D], whose sum is within 2^-17 of it; elsewhere the weights themselves."""
    if not fn.is_cuda:
        return fn
    from . import triton_kernel

    return triton_kernel.split_weights(fn)


def predict_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> Mixes:
    """streams [rows, S, D], fn of `prepare_weights`, scale (spread) and base [(2 + S) · S] -> the row's `Mixes`.

    The projection takes the streams as they are; its result is scaled by rsqrt(mean square + rms_eps) over all S · D
    channels.
    """
    assert fn.shape[-2:] == (scale.shape[0], streams.shape[1] * streams.shape[2]), (fn.shape, streams.shape)
    if streams.is_cuda and streams.dtype == torch.bfloat16:
        from . import triton_kernel

        # With so few rows at a time the sums are split alike, however many there are.
        tiles = streams.split(tile_rows(len(streams), TILE_ON_GPU))
        parts = [
            triton_kernel.predict_mixes(tile, fn, scale, base, rms_eps=rms_eps, eps=eps, iterations=iterations)
            for tile in tiles
        ]
        return Mixes(*parts[0]) if len(parts) == 1 else Mixes(*map(torch.cat, zip(*parts, strict=True)))
    fn = fn if fn.ndim == 2 else fn.float().sum(dim=0)
    if library.takes(streams, fn, scale, base) and streams.shape[1] <= native.STREAMS_MAX:
        return native.predict_mixes(streams, fn, scale, base, rms_eps=rms_eps, eps=eps, iterations=iterations)
    return reference.predict_mixes(streams, fn, scale, base, rms_eps=rms_eps, eps=eps, iterations=iterations)


def split_mixes(values: Tensor, scale: Tensor, base: Tensor, *, eps: float, iterations: int) -> Mixes:
    """values [rows, (2 + S) · S], already normalised -> `Mixes`: sigmoids for pre and post, Sinkhorn for comb."""
    assert values.shape[1:] == scale.shape == base.shape, (values.shape, scale.shape, base.shape)
    if library.takes(values, scale, base) and values.shape[1] <= (2 + native.STREAMS_MAX) * native.STREAMS_MAX:
        return native.split_mixes(values, scale, base, eps=eps, iterations=iterations)
    return reference.split_mixes(values, scale, base, eps=eps, iterations=iterations)


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """streams [rows, S, D], weights [rows, S] -> Σ_i weights_i · stream_i [rows, D], in the dtype of `streams`."""
    assert streams.shape[:2] == weights.shape, (streams.shape, weights.shape)
    if streams.is_cuda and streams.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.collapse(streams, weights)
    if library.takes(streams, weights):
        return native.collapse(streams, weights)
    return reference.collapse(streams, weights)


def expand(y: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    """y [rows, D], streams [rows, S, D] -> [rows, S, D]: stream i becomes post_i · y + Σ_j comb[j, i] · stream_j."""
    assert y.shape == (streams.shape[0], streams.shape[2]), (y.shape, streams.shape)
    if streams.is_cuda and streams.dtype == torch.bfloat16:
        from . import triton_kernel

        return triton_kernel.expand(y, streams, mixes.post, mixes.comb)
    if library.takes(y, streams, mixes.post, mixes.comb):
        return native.expand(y, streams, mixes)
    return reference.expand(y, streams, mixes)
