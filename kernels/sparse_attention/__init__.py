"""Attention of a row over packed records: its window, the entries chosen for it, and a sink.

Reads the caches' own bytes, FP8 window rows and FP4 entries, turns queries by the row's rotary angles and the result
back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32

from . import reference

__all__ = ["sparse_attention"]


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    bases: Tensor,
    positions: Tensor,
    lowest: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: int,
    window_rows: int,
    scale: float,
    entries: Tensor | None = None,
    chosen: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Attention of `queries` [rows, heads, width] -> [rows, heads, width] in their dtype.

    window     [pool, record_bytes] uint8, `FP8_BLOCK32` records; that of position p is bases[row] + p mod ring
    bases      [rows] int32; positions, lowest [rows] int32: row sees max(lowest, position - window_rows + 1) … position
    entries    [pool, record_bytes] uint8, `FP4_BLOCK16` records
    chosen     [rows, count] int32, count a power of two: places in `entries`, then -1
    sink       [heads] float32, a raw logit without a value
    cos, sin   [rows, pairs] float32: the last 2 · pairs channels of queries are turned by these angles, those of the
               result back

    Softmax over scale · q·k; without keys the result is 0. bfloat16 on a GPU: keys and weights are bfloat16 there, sums
    float32. `batch_invariant`: a row's bits do not depend on how many rows come with it.
    """
    rows, heads, width = queries.shape
    assert window.shape[1] == FP8_BLOCK32.record_bytes(width), (window.shape, width)
    assert bases.shape == positions.shape == lowest.shape == (rows,), (bases.shape, positions.shape, lowest.shape)
    assert sink.shape == (heads,) and cos.shape == sin.shape and cos.shape[0] == rows, (sink.shape, cos.shape)
    assert (entries is None) == (chosen is None), "entries and what is chosen of them come together"
    if entries is not None and chosen is not None:
        assert entries.shape[1] == FP4_BLOCK16.record_bytes(width) and chosen.shape[0] == rows, (
            entries.shape,
            chosen.shape,
        )
    arguments = (queries, window, bases, positions, lowest, sink, cos, sin)
    sizes: dict[str, Any] = {
        "ring": ring,
        "window_rows": window_rows,
        "scale": scale,
        "entries": entries,
        "chosen": chosen,
    }
    if not queries.is_cuda:
        return reference.sparse_attention(*arguments, **sizes)
    if queries.dtype != torch.bfloat16:
        note_fallback("sparse_attention", f"queries are {queries.dtype}")
        return reference.sparse_attention(*arguments, **sizes)
    if torch.cuda.get_device_capability(queries.device)[0] == 9 and heads == 64 and width == 512:
        from .gluon_kernel import sparse_attention as on_hopper

        return on_hopper(*arguments, **sizes, batch_invariant=batch_invariant)
    from .triton_kernel import sparse_attention as anywhere

    return anywhere(*arguments, **sizes, batch_invariant=batch_invariant)
