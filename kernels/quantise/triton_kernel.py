"""FP8 round trips in Triton: what a matrix with quantised inputs multiplies, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import begin_early, comes_early, e4m3_nearest, power_of_two, power_of_two_exponent

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(1e-4 / 448.0)


@triton.jit
def fp8_round_trip(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What an `FP8_BLOCK32` record of x [ROWS, WIDTH] float32 would hold."""
    grouped = x.reshape(ROWS, WIDTH // GROUP, GROUP)
    exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 2) / 448.0, TARGET_MIN))
    inverse, scale = power_of_two(254 - exponent)[:, :, None], power_of_two(exponent)[:, :, None]
    return (e4m3_nearest(grouped * inverse) * scale).reshape(ROWS, WIDTH)


@triton.jit
def round_trip_kernel(x, out, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    tl.store(out + at, fp8_round_trip(value.reshape(1, BLOCK), 1, BLOCK).reshape(BLOCK))


def fp8_block32_round_trip(x: Tensor) -> Tensor:
    """As `FP8_BLOCK32.round_trip`, for bfloat16 or float32 on a GPU, or in Triton's interpreter."""
    x = x.contiguous()
    out, block = torch.empty_like(x), 32
    sizes = launch_sizes("round_trip", x, rows=x.numel() // max(1, x.shape[-1]), shape=x.shape[-1])
    while block < sizes["BLOCK"] and x.numel() % (2 * block) == 0:
        block *= 2
    early = comes_early(x, x.numel() // block)
    if x.numel():
        round_trip_kernel[(x.numel() // block,)](
            x, out, BLOCK=block, EARLY=early, num_warps=1 if block < 256 else sizes["num_warps"], launch_pdl=early
        )
    return out
