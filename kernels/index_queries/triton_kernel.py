"""Rotation and MXFP4 round trip of index queries in one pass, in Triton."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import (
    begin_early,
    comes_early,
    e2m1_nearest,
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
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    VECTORS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program turns and rounds VECTORS heads of a row."""
    begin_early(EARLY)
    first = tl.program_id(0) * VECTORS
    channel = tl.arange(0, HALF)
    at = (first + tl.arange(0, VECTORS)).to(tl.int64)[:, None] * HALF + channel[None, :]
    every = (channel >= 0)[None, :]
    even, odd = load_pairs(queries, at, every)
    pair = channel - (HALF - PAIRS)
    c = tl.load(cos + first // HEADS * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + first // HEADS * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    dtype = queries.dtype.element_ty
    turned = rounded(even * c - odd * s, dtype)
    odd = rounded(odd * c + even * s, dtype)
    even = turned
    exponent = power_of_two_exponent(tl.maximum(group_maxima(even, odd, VECTORS, HALF, GROUP) / 6.0, TARGET_MIN))
    scale = spread_groups(power_of_two(exponent), VECTORS, HALF, GROUP)
    inverse = spread_groups(power_of_two(254 - exponent), VECTORS, HALF, GROUP)
    even = e2m1_nearest(even * inverse) * scale
    odd = e2m1_nearest(odd * inverse) * scale
    store_pairs(out, at, even, odd, every)


def index_queries(queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `whalepod.kernels.index_queries.index_queries`, on a GPU, or in Triton's interpreter."""
    rows, heads, width = queries.shape
    out = torch.empty(rows, heads, width, dtype=queries.dtype, device=queries.device)
    # Few small programs have less to wait for, many cost more to start.
    sizes = launch_sizes("index_queries", queries, rows=rows, shape=heads)
    each = math.gcd(heads, sizes["VECTORS"])
    early = comes_early(queries, rows * heads // each)
    if rows:
        index_queries_kernel[(rows * heads // each,)](
            queries.contiguous(),
            cos,
            sin,
            out,
            HEADS=heads,
            HALF=width // 2,
            PAIRS=cos.shape[1],
            VECTORS=each,
            EARLY=early,
            num_warps=sizes["num_warps"],
            launch_pdl=early,
        )
    return out
