"""The operators of `operators.c`."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

from .reference import Mixes

STREAMS_MAX = 16
"""As in `streams.c`."""

_predict_mixes, _split_mixes = operator("predict_mixes"), operator("split_mixes")
_collapse, _expand = operator("collapse"), operator("expand")


def predict_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> Mixes:
    streams, fn, scale, base = streams.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
    rows, count, width = streams.shape
    values, mixes = streams.new_empty(rows, fn.shape[0]), _room(streams, rows, count)
    _predict_mixes(
        streams.data_ptr(), fn.data_ptr(), scale.data_ptr(), base.data_ptr(), values.data_ptr(),
        mixes.pre.data_ptr(), mixes.post.data_ptr(), mixes.comb.data_ptr(),
        rows, count, count * width, rms_eps, eps, iterations,
    )  # fmt: skip
    return mixes


def split_mixes(values: Tensor, scale: Tensor, base: Tensor, *, eps: float, iterations: int) -> Mixes:
    values, scale, base = values.contiguous(), scale.contiguous(), base.contiguous()
    count = round((1 + values.shape[1]) ** 0.5) - 1  # (2 + S) · S coefficients
    mixes = _room(values, values.shape[0], count)
    _split_mixes(
        values.data_ptr(), scale.data_ptr(), base.data_ptr(),
        mixes.pre.data_ptr(), mixes.post.data_ptr(), mixes.comb.data_ptr(), values.shape[0], count, eps, iterations,
    )  # fmt: skip
    return mixes


def _room(like: Tensor, rows: int, count: int) -> Mixes:
    return Mixes(like.new_empty(rows, count), like.new_empty(rows, count), like.new_empty(rows, count, count))


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    streams, weights = streams.contiguous(), weights.contiguous()
    rows, count, width = streams.shape
    out = streams.new_empty(rows, width)
    _collapse(streams.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, count, width)
    return out


def expand(y: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    y, streams, post, comb = y.contiguous(), streams.contiguous(), mixes.post.contiguous(), mixes.comb.contiguous()
    out = torch.empty_like(streams)
    _expand(
        y.data_ptr(), streams.data_ptr(), post.data_ptr(), comb.data_ptr(), out.data_ptr(), *streams.shape
    )  # fmt: skip
    return out
