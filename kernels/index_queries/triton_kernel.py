"""Rotation and MXFP4 round trip of index queries in one pass, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import (
    e2m1_codes,
    e2m1_values,
    group_maxima,
    load_pairs,
    power_of_two,
    power_of_two_exponent,
    rounded,
    spread_groups,
    store_pairs,
)

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(2.0**-126)


@triton.jit
def index_queries_kernel(
    queries,
    cos,
    sin,
    out,
    vectors,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """A program turns and rounds VECTORS heads, of one row or of several."""
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    there = (vector < vectors)[:, None]
    channel = tl.arange(0, HALF)
    at = vector.to(tl.int64)[:, None] * (2 * HALF) + 2 * channel[None, :]
    even, odd = load_pairs(queries, at, there)
    pair = channel - (HALF - PAIRS)
    angle = (vector // HEADS)[:, None] * PAIRS + pair[None, :]
    turning = there & (pair >= 0)[None, :]
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    dtype = queries.dtype.element_ty
    turned = rounded(even * c - odd * s, dtype)
    odd = rounded(odd * c + even * s, dtype)
    even = turned
    exponent = power_of_two_exponent(tl.maximum(group_maxima(even, odd, VECTORS, HALF, GROUP) / 6.0, TARGET_MIN))
    # Divided, not multiplied: the inverse of the smallest scales is no float32.
    scale = spread_groups(power_of_two(exponent), VECTORS, HALF, GROUP)
    even = e2m1_values(e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))) * scale
    odd = e2m1_values(e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))) * scale
    store_pairs(out, at, even, odd, there)


def index_queries(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `whalepod.kernels.index_queries.index_queries`, on a GPU, or in Triton's interpreter."""
    rows, heads, width = queries.shape
    out = torch.empty(rows, heads, width, dtype=queries.dtype, device=queries.device)
    vectors, each = rows * heads, 4
    if vectors:
        index_queries_kernel[(triton.cdiv(vectors, each),)](
            queries.contiguous(),
            cos,
            sin,
            out,
            vectors,
            HEADS=heads,
            HALF=width // 2,
            PAIRS=cos.shape[1],
            VECTORS=each,
            num_warps=1,
        )
    return out
