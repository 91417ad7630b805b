"""Attention of each row over its own gathered keys, which are also the values, with a sink."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference


def sink_attention(queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, *, scale: float) -> Tensor:
    """queries [rows, heads, width], keys [rows, count, width], valid [rows, count] bool, sink [heads]
    -> [rows, heads, width] in the dtype of `queries`.

    Softmax over scale · q·k of the valid keys and the raw sink; the sink has no value, so without keys the result is
    0. Keys that are not valid must be finite. A row's bits depend on its own keys and their places only.
    """
    rows, heads, width = queries.shape
    assert keys.shape == (*valid.shape, width), (queries.shape, keys.shape, valid.shape)
    assert (valid.shape[0], sink.shape[0]) == (rows, heads), (queries.shape, valid.shape, sink.shape)
    if library.takes(queries, keys, sink):
        return native.sink_attention(queries, keys, valid, sink, scale=scale)
    return reference.sink_attention(queries, keys, valid, sink, scale=scale)
