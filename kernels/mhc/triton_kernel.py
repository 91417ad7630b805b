"""Hyper-connections in Triton: the projection splits its long sum over programs, one small kernel does the rest of it.

Each weight is the sum of two bfloat16 numbers, within 2^-17 of it, and streams are bfloat16 already: products of those
are exact, and sums float32. What is left of a weight is less than what sums of 20,480 products lose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PROGRAMS = 264
"""Two for each processor of an H100 or H200."""
SHAPES = ((1536, 128, 64, 8, 4, 32, 4), (65, 64, 128, 4, 3, 32, 4), (0, 64, 128, 4, 3, 80, 1))
"""Tuned on H200: from that many rows on, rows of a tile, channels of a step, warps, stages, the most parts, and rows of
a program that adds the parts: it holds all of them at once."""


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    streams,
    fn,
    products,
    squares,
    rows,
    width,
    steps,
    OUT: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    FAST: tl.constexpr,
):
    """Program (tile, part): Σ over the part's channels of stream · fn [ROWS, OUT] and of stream² [ROWS]."""
    if FAST:
        gdc_launch_dependents()
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.arange(0, OUT_BLOCK)
    sums = tl.zeros((ROWS, OUT_BLOCK), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        channel = step * STEP + tl.arange(0, STEP)
        x = tl.load(
            streams + row.to(tl.int64)[:, None] * width + channel[None, :],
            mask=(row < rows)[:, None] & (channel < width)[None, :],
            other=0.0,
        )
        weight = tl.load(
            fn + output[:, None] * width + channel[None, :],
            mask=(output < OUT)[:, None] & (channel < width)[None, :],
            other=0.0,
        )
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        if FAST:
            first = weight.to(tl.bfloat16)
            second = (weight - first.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(x, tl.trans(second), sums)
            sums = tl.dot(x, tl.trans(first), sums)
        else:
            sums = tl.dot(wide, tl.trans(weight), sums, input_precision="ieee")
    at = part * rows + row
    tl.store(products + at[:, None] * OUT_BLOCK + output[None, :], sums, mask=(row < rows)[:, None])
    tl.store(squares + at, square, mask=row < rows)


@triton.jit
def _part_sums(
    products,
    square_root,
    scale,
    base,
    row,
    rows,
    first,
    parts,
    OUT_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Coefficients first … first + COUNT - 1 of rows: parts added, normalised, scaled."""
    output = first + tl.arange(0, COUNT)
    part = tl.arange(0, PARTS)[None, :, None]
    at = (part * rows + row[:, None, None]) * OUT_BLOCK + output[None, None, :]
    total = tl.sum(tl.load(products + at, mask=(row[:, None, None] < rows) & (part < parts), other=0.0), 1)
    return total * square_root[:, None] * tl.load(scale + output)[None, :] + tl.load(base + output)[None, :]


@triton.jit(do_not_specialize=["rows", "parts"])
def finish_kernel(
    products,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    rows,
    width,
    parts,
    rms_eps,
    eps,
    iterations,
    S: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sigmoids of the first 2 · S coefficients, Sinkhorn of the other S · S. Launched before the projection has ended,
    for which it waits."""
    if FAST:
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)[None, :]
    there = (row < rows)[:, None]
    square = tl.sum(tl.load(squares + part * rows + row[:, None], mask=there & (part < parts), other=0.0), 1)
    root = 1.0 / tl.sqrt(square / width + rms_eps)
    stream = tl.arange(0, S)
    z_pre = _part_sums(products, root, scale, base, row, rows, 0, parts, OUT_BLOCK, S, PARTS)
    z_post = _part_sums(products, root, scale, base, row, rows, S, parts, OUT_BLOCK, S, PARTS)
    z = _part_sums(products, root, scale, base, row, rows, 2 * S, parts, OUT_BLOCK, S * S, PARTS)
    tl.store(pre + row[:, None] * S + stream[None, :], 1.0 / (1.0 + tl.exp(-z_pre)) + eps, mask=there)
    tl.store(post + row[:, None] * S + stream[None, :], 2.0 / (1.0 + tl.exp(-z_post)), mask=there)
    z = z.reshape(ROWS, S, S)
    mix = tl.exp(z - tl.max(z, 2)[:, :, None])
    mix = mix / tl.sum(mix, 2)[:, :, None] + eps
    mix = mix / (tl.sum(mix, 1)[:, None, :] + eps)
    for _ in range(iterations - 1):
        mix = mix / (tl.sum(mix, 2)[:, :, None] + eps)
        mix = mix / (tl.sum(mix, 1)[:, None, :] + eps)
    pair = tl.arange(0, S * S)
    tl.store(comb + row[:, None] * (S * S) + pair[None, :], mix.reshape(ROWS, S * S), mask=there)


@triton.jit
def collapse_kernel(streams, weights, out, width, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(S):
        x = tl.load(streams + (row * S + stream) * width + channel, mask=channel < width, other=0.0)
        total += tl.load(weights + row * S + stream) * x.to(tl.float32)
    tl.store(out + row * width + channel, total, mask=channel < width)


@triton.jit
def expand_kernel(y, streams, post, comb, out, width, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < width
    own = tl.load(y + row * width + channel, mask=there, other=0.0).to(tl.float32)
    for target in tl.static_range(S):
        total = tl.load(post + row * S + target) * own
        for stream in tl.static_range(S):
            x = tl.load(streams + (row * S + stream) * width + channel, mask=there, other=0.0)
            total += tl.load(comb + (row * S + stream) * S + target) * x.to(tl.float32)
        tl.store(out + (row * S + target) * width + channel, total, mask=there)


def predict_mixes(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [rows, S], post [rows, S], comb [rows, S, S] float32 of `whalepod.kernels.mhc.predict_mixes`."""
    rows, count, channels = streams.shape
    width, device = count * channels, streams.device
    pre, post = (torch.empty(rows, count, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(rows, count, count, dtype=torch.float32, device=device)
    if rows == 0:
        return pre, post, comb
    tile, step, num_warps, num_stages, parts_max, finish_rows = next(
        shape for rows_min, *shape in SHAPES if rows >= rows_min
    )
    tiles, steps = triton.cdiv(rows, tile), triton.cdiv(width, step)
    each = triton.cdiv(steps, max(1, min(steps, parts_max, PROGRAMS // tiles)))
    parts = triton.cdiv(steps, each)
    block = max(16, triton.next_power_of_2(fn.shape[0]))
    fast = streams.dtype == torch.bfloat16 and streams.is_cuda
    products = torch.empty(parts, rows, block, dtype=torch.float32, device=device)
    squares = torch.empty(parts, rows, dtype=torch.float32, device=device)
    project_kernel[(tiles, parts)](
        streams.contiguous(),
        fn,
        products,
        squares,
        rows,
        width,
        each,
        OUT=fn.shape[0],
        OUT_BLOCK=block,
        ROWS=tile,
        STEP=step,
        FAST=fast,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    finish_kernel[(triton.cdiv(rows, finish_rows),)](
        products,
        squares,
        scale,
        base,
        pre,
        post,
        comb,
        rows,
        width,
        parts,
        rms_eps,
        eps,
        iterations,
        S=count,
        OUT_BLOCK=block,
        ROWS=finish_rows,
        PARTS=triton.next_power_of_2(parts),
        FAST=fast,
        num_warps=1,
        launch_pdl=fast,
    )
    return pre, post, comb


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """As `whalepod.kernels.mhc.collapse`."""
    rows, count, width = streams.shape
    out = torch.empty(rows, width, dtype=streams.dtype, device=streams.device)
    if rows:
        collapse_kernel[(rows, triton.cdiv(width, 1024))](
            streams.contiguous(), weights.contiguous(), out, width, S=count, BLOCK=1024, num_warps=4
        )
    return out


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `whalepod.kernels.mhc.expand`."""
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    if rows:
        expand_kernel[(rows, triton.cdiv(width, 1024))](
            y.contiguous(),
            streams.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            out,
            width,
            S=count,
            BLOCK=1024,
            num_warps=4,
        )
    return out
