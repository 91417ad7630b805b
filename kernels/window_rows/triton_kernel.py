"""One pass from a projected row to its window record, in Triton: normalise, rotate, quantise, write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import (
    begin_early,
    comes_early,
    e4m3_bytes,
    group_maxima,
    load_pairs,
    power_of_two,
    power_of_two_exponent,
    rounded,
    spread_groups,
)

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(1e-4 / 448.0)
ROWS_EACH = 4


@triton.jit(do_not_specialize=["count"])
def window_rows_kernel(
    rows,
    weight,
    cos,
    sin,
    destinations,
    pool,
    count,
    eps,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)[None, :]
    weight_even, weight_odd = load_pairs(weight, pair, pair >= 0)
    begin_early(EARLY)
    target = tl.load(destinations + row, mask=row < count, other=-1)
    there = (target >= 0)[:, None]
    even, odd = load_pairs(rows, row.to(tl.int64)[:, None] * HALF + pair, there)
    turning = there & (pair >= HALF - PAIRS)
    angle = row[:, None] * PAIRS + pair - (HALF - PAIRS)
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    root = (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / WIDTH + eps))[:, None]
    # Rounded to the rows' dtype after the norm and after the rotation, as the steps it replaces do.
    dtype = rows.dtype.element_ty
    even = rounded(even * root * weight_even, dtype)
    odd = rounded(odd * root * weight_odd, dtype)
    turned = rounded(even * c - odd * s, dtype)
    odd = rounded(odd * c + even * s, dtype)
    even = turned

    exponent = power_of_two_exponent(tl.maximum(group_maxima(even, odd, ROWS, HALF, GROUP) / 448.0, TARGET_MIN))
    inverse = spread_groups(power_of_two(254 - exponent), ROWS, HALF, GROUP)
    scaled = tl.clamp(tl.join(even * inverse, odd * inverse).reshape(ROWS, WIDTH), -448.0, 448.0)
    record = target.to(tl.int64)[:, None] * (WIDTH + WIDTH // GROUP)
    tl.store(pool + record + tl.arange(0, WIDTH)[None, :], e4m3_bytes(scaled), mask=there)
    group = tl.arange(0, WIDTH // GROUP)[None, :]
    tl.store(pool + record + WIDTH + group, exponent.to(tl.uint8), mask=there)


def write_window_rows(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, destinations: Tensor, pool: Tensor, *, eps: float
) -> None:
    """As `whalepod.kernels.window_rows.write_window_rows`, on a GPU, or in Triton's interpreter."""
    count, width = rows.shape
    programs = triton.cdiv(count, ROWS_EACH)
    early = comes_early(rows, programs)
    if count:
        window_rows_kernel[(programs,)](
            rows.contiguous(),
            weight,
            cos,
            sin,
            destinations,
            pool,
            count,
            eps,
            PAIRS=cos.shape[1],
            WIDTH=width,
            ROWS=ROWS_EACH,
            EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
