"""Rotation in place, in Triton: reads and writes only the channels that turn."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import load_pairs, rounded, store_pairs


@triton.jit
def rotate_kernel(
    x, cos, sin, vectors, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr
):
    vector = tl.program_id(0) * EACH + tl.arange(0, EACH)
    there = (vector < vectors)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    at = vector.to(tl.int64)[:, None] * WIDTH + WIDTH - 2 * PAIRS + 2 * pair
    even, odd = load_pairs(x, at, there)
    angle = (vector // HEADS)[:, None] * PAIRS + pair
    c = tl.load(cos + angle, mask=there, other=1.0)
    s = tl.load(sin + angle, mask=there, other=0.0)
    dtype = x.dtype.element_ty
    store_pairs(x, at, rounded(even * c - odd * s, dtype), rounded(odd * c + even * s, dtype), there)


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As `whalepod.kernels.rope.rotate_in_place`, on a GPU, or in Triton's interpreter. Pairs a power of two."""
    rows, heads, width = x.shape
    vectors, each = rows * heads, 8
    if vectors:
        rotate_kernel[(triton.cdiv(vectors, each),)](
            x, cos, sin, vectors, HEADS=heads, WIDTH=width, PAIRS=cos.shape[1], EACH=each, num_warps=1
        )
