"""Query latents: the norm of rows, and what a quantised matrix rounds them to, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from whalepod.kernels.packing_kernel import begin_early, narrowed, rounded
from whalepod.kernels.quantise.triton_kernel import fp8_round_trip


@triton.jit
def latent_part(
    program,
    rows,
    weight,
    out,
    count,
    eps,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows, held as tensors of CHUNK channels: a row need not be a power of two wide."""
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    there = row < count
    channel = tl.arange(0, CHUNK)[None, :]
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * CHUNK + tl.broadcast_to(channel, (ROWS, CHUNK))
        weights = weights + (tl.load(weight + at, mask=at < WIDTH, other=0.0),)  # noqa: RUF005
    begin_early(EARLY)
    values = ()
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * CHUNK + channel
        value = tl.load(rows + row.to(tl.int64) * STRIDE + at, mask=there & (at < WIDTH), other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
        values = values + (value,)  # noqa: RUF005
    root = (1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps))[:, None]
    for chunk in tl.static_range(CHUNKS):
        at = chunk * CHUNK + channel
        value = values[chunk].to(tl.float32) * root * weights[chunk].to(tl.float32)
        if ROUND:
            value = fp8_round_trip(rounded(value, rows.dtype.element_ty), ROWS, CHUNK)
        else:
            value = narrowed(value, rows.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * WIDTH + at, value, mask=there & (at < WIDTH))
