"""One pass from a projected row to its window record, in Triton: normalise, rotate, quantise, write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import e4m3_bytes, rounded

GROUP = tl.constexpr(32)
AMAX_MIN = tl.constexpr(1e-4)


@triton.jit
def window_rows_kernel(rows, weight, cos, sin, destinations, pool, eps, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(destinations + row)
    if target >= 0:
        HALF: tl.constexpr = WIDTH // 2
        GROUPS: tl.constexpr = WIDTH // GROUP
        pair = tl.arange(0, HALF)
        even = tl.load(rows + row * WIDTH + 2 * pair).to(tl.float32)
        odd = tl.load(rows + row * WIDTH + 2 * pair + 1).to(tl.float32)
        root = 1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 0) / WIDTH + eps)
        # Rounded to the rows' dtype after the norm and after the rotation, as the steps it replaces do.
        even = rounded(even * root * tl.load(weight + 2 * pair).to(tl.float32), rows.dtype.element_ty)
        odd = rounded(odd * root * tl.load(weight + 2 * pair + 1).to(tl.float32), rows.dtype.element_ty)
        turning = pair >= HALF - PAIRS
        c = tl.load(cos + row * PAIRS + pair - (HALF - PAIRS), mask=turning, other=1.0)
        s = tl.load(sin + row * PAIRS + pair - (HALF - PAIRS), mask=turning, other=0.0)
        turned = rounded(even * c - odd * s, rows.dtype.element_ty)
        odd = rounded(odd * c + even * s, rows.dtype.element_ty)
        even = turned

        largest = tl.maximum(tl.abs(even), tl.abs(odd)).reshape(GROUPS, GROUP // 2)
        bits = (tl.maximum(tl.max(largest, 1), AMAX_MIN) / 448.0).to(tl.int32, bitcast=True)
        # The exponent of the smallest power of two that is not below it.
        scale = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
        inverse = tl.broadcast_to(inverse[:, None], (GROUPS, GROUP // 2)).reshape(HALF)
        record = pool + target.to(tl.int64) * (WIDTH + GROUPS)
        tl.store(record + 2 * pair, e4m3_bytes(tl.clamp(even * inverse, -448.0, 448.0)))
        tl.store(record + 2 * pair + 1, e4m3_bytes(tl.clamp(odd * inverse, -448.0, 448.0)))
        tl.store(record + WIDTH + tl.arange(0, GROUPS), scale.to(tl.uint8))


def write_window_rows(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, destinations: Tensor, pool: Tensor, *, eps: float
) -> None:
    """As `whalepod.kernels.window_rows.write_window_rows`, on a GPU, or in Triton's interpreter."""
    count, width = rows.shape
    if count:
        window_rows_kernel[(count,)](
            rows.contiguous(), weight, cos, sin, destinations, pool, eps, PAIRS=cos.shape[1], WIDTH=width, num_warps=2
        )
