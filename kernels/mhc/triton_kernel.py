"""Hyper-connections in Triton: the projection splits its long sum over programs, one small kernel does the rest of it.

Each weight is the sum of two bfloat16 numbers (`split_weights`), within 2^-17 of it, and streams are bfloat16 already:
products of those are exact, and sums float32. What is left of a weight is less than what sums of 20,480 products lose.
Rows and weights stay in shared memory, where the matrix unit takes them from: rows' squares, too, are products there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import begin_early, comes_early, reciprocal

PROGRAMS = 264
"""Two for each processor of an H100 or H200."""
TILE, STEP = 64, 128
"""Rows of a tile, and channels of a step."""


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    streams,
    halves,
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
    """Program (tile, part): Σ over the part's channels of stream · weight [ROWS, OUT] and of stream² [ROWS].

    halves [2, OUT, width] bfloat16; products [parts, rows, OUT_BLOCK] and squares [parts, rows] float32
    """
    begin_early(FAST)
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Both halves of all outputs, side by side.
    output = tl.arange(0, 2 * OUT_BLOCK)
    source = output // OUT_BLOCK * OUT + output % OUT_BLOCK
    own = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, 2 * OUT_BLOCK), tl.float32)
    pairs = tl.zeros((ROWS, ROWS), tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        channel = step * STEP + tl.arange(0, STEP)
        inside = (channel < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + channel[None, :]
        x = tl.load(streams + at, mask=(row < rows)[:, None] & inside, other=0.0)
        at = source[:, None] * width + channel[None, :]
        weight = tl.load(halves + at, mask=(output % OUT_BLOCK < OUT)[:, None] & inside, other=0.0)
        if FAST:
            sums = tl.dot(x, tl.trans(weight), sums)
            pairs = tl.dot(x, tl.trans(x), pairs)
        else:
            wide = x.to(tl.float32)
            sums = tl.dot(wide, tl.trans(weight.to(tl.float32)), sums, input_precision="ieee")
            pairs = tl.dot(wide, tl.trans(wide), pairs, input_precision="ieee")
    at = part * rows + row
    total = tl.sum(sums.reshape(ROWS, 2, OUT_BLOCK), 1)
    tl.store(products + at[:, None] * OUT_BLOCK + tl.arange(0, OUT_BLOCK)[None, :], total, mask=(row < rows)[:, None])
    square = tl.sum(tl.where(own[:, None] == own[None, :], pairs, 0.0), 1)
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
    begin_early(FAST)
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
    pair = tl.arange(0, S * S)
    mix = _sinkhorn4(z, eps, iterations, ROWS) if S == 4 else _sinkhorn(z, eps, iterations, ROWS, S)
    tl.store(comb + row[:, None] * (S * S) + pair[None, :], mix, mask=there)


@triton.jit
def _sinkhorn(z, eps, iterations, ROWS: tl.constexpr, S: tl.constexpr):
    """z [ROWS, S · S] -> softmax over the last axis of [S, S], + eps, then `iterations` normalisations of each axis in
    turn, without the first of the last axis."""
    z = z.reshape(ROWS, S, S)
    mix = tl.exp(z - tl.max(z, 2)[:, :, None])
    mix = mix / tl.sum(mix, 2)[:, :, None] + eps
    mix = mix / (tl.sum(mix, 1)[:, None, :] + eps)
    for _ in range(iterations - 1):
        mix = mix / (tl.sum(mix, 2)[:, :, None] + eps)
        mix = mix / (tl.sum(mix, 1)[:, None, :] + eps)
    return mix.reshape(ROWS, S * S)


@triton.jit
def _sinkhorn4(z, eps, iterations, ROWS: tl.constexpr):
    """`_sinkhorn` of four streams: a thread holds a row's sixteen numbers, and no sum goes from thread to thread."""
    a, b, c, d = _quarters(z.reshape(ROWS, 2, 2, 2, 2))
    a0, a1, a2, a3 = _quarters(a)
    b0, b1, b2, b3 = _quarters(b)
    c0, c1, c2, c3 = _quarters(c)
    d0, d1, d2, d3 = _quarters(d)
    a0, b0, c0, d0 = _softmax(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _softmax(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _softmax(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _softmax(a3, b3, c3, d3, eps)
    for iteration in range(iterations):
        if iteration > 0:
            a0, b0, c0, d0 = _shares(a0, b0, c0, d0, eps)
            a1, b1, c1, d1 = _shares(a1, b1, c1, d1, eps)
            a2, b2, c2, d2 = _shares(a2, b2, c2, d2, eps)
            a3, b3, c3, d3 = _shares(a3, b3, c3, d3, eps)
        a0, a1, a2, a3 = _shares(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _shares(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _shares(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _shares(d0, d1, d2, d3, eps)
    a, b, c, d = _whole(a0, a1, a2, a3), _whole(b0, b1, b2, b3), _whole(c0, c1, c2, c3), _whole(d0, d1, d2, d3)
    return _whole(a, b, c, d).reshape(ROWS, 16)


@triton.jit
def _quarters(x):
    """x [.., 2, 2] -> its four parts [..]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _whole(first, second, third, fourth):
    """The other way."""
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _softmax(a, b, c, d, eps):
    highest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _shares(tl.exp(a - highest), tl.exp(b - highest), tl.exp(c - highest), tl.exp(d - highest), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _shares(a, b, c, d, eps):
    inverse = reciprocal((a + b) + (c + d) + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def collapse_kernel(streams, weights, out, width, S: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(S):
        x = tl.load(streams + (row * S + stream) * width + channel, mask=channel < width, other=0.0)
        total += tl.load(weights + row * S + stream) * x.to(tl.float32)
    tl.store(out + row * width + channel, total, mask=channel < width)


@triton.jit
def expand_kernel(y, streams, post, comb, out, width, S: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
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


def split_weights(fn: Tensor) -> Tensor:
    """fn [.., width] float32 -> two bfloat16 numbers of each weight [2, .., width], whose sum is within 2^-17 of it."""
    first = fn.to(torch.bfloat16)
    return torch.stack((first, (fn - first.float()).to(torch.bfloat16)))


def predict_mixes(
    streams: Tensor,
    halves: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [rows, S], post [rows, S], comb [rows, S, S] float32 of `whalepod.kernels.mhc.predict_mixes`; `halves` of
    `split_weights`."""
    rows, count, channels = streams.shape
    width, device = count * channels, streams.device
    pre, post = (torch.empty(rows, count, dtype=torch.float32, device=device) for _ in range(2))
    comb = torch.empty(rows, count, count, dtype=torch.float32, device=device)
    if rows == 0:
        return pre, post, comb
    sizes = launch_sizes("mhc_predict", streams, rows=rows, shape=channels)
    tiles, steps = triton.cdiv(rows, TILE), triton.cdiv(width, STEP)
    each = triton.cdiv(steps, max(1, min(steps, sizes["parts_max"], PROGRAMS // tiles)))
    parts = triton.cdiv(steps, each)
    out = halves.shape[1]
    block = max(16, triton.next_power_of_2(out))
    fast = streams.dtype == torch.bfloat16 and streams.is_cuda
    products = torch.empty(parts, rows, block, dtype=torch.float32, device=device)
    squares = torch.empty(parts, rows, dtype=torch.float32, device=device)
    project_kernel[(tiles, parts)](
        streams.contiguous(),
        halves,
        products,
        squares,
        rows,
        width,
        each,
        OUT=out,
        OUT_BLOCK=block,
        ROWS=TILE,
        STEP=STEP,
        FAST=fast,
        num_warps=4,
        num_stages=sizes["num_stages"],
        launch_pdl=fast,
    )
    finish_kernel[(triton.cdiv(rows, sizes["finish_rows"]),)](
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
        ROWS=sizes["finish_rows"],
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
    sizes = launch_sizes("mhc_collapse", streams, rows=rows, shape=width)
    grid = (rows, triton.cdiv(width, sizes["BLOCK"]))
    early = comes_early(streams, grid[0] * grid[1])
    if rows:
        collapse_kernel[grid](
            streams.contiguous(),
            weights.contiguous(),
            out,
            width,
            S=count,
            EARLY=early,
            launch_pdl=early,
            **sizes,
        )
    return out


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `whalepod.kernels.mhc.expand`."""
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    sizes = launch_sizes("mhc_expand", streams, rows=rows, shape=width)
    grid = (rows, triton.cdiv(width, sizes["BLOCK"]))
    early = comes_early(streams, grid[0] * grid[1])
    if rows:
        expand_kernel[grid](
            y.contiguous(),
            streams.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            out,
            width,
            S=count,
            EARLY=early,
            launch_pdl=early,
            **sizes,
        )
    return out
