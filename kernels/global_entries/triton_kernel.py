"""Entries of global KV and their index keys in Triton: one pass over rows, one over tiles of them.

    raw rows ─ pool, norm ─┬─ turn, pack ─▶ entry
                           └─▶ latent ─ product, norm, turn, pack ─▶ index key

Programs whose group does not end end at once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.numerics import tiled
from whalepod.kernels.packing_kernel import (
    begin_early,
    comes_early,
    e2m1_codes,
    e4m3_bytes,
    e4m3_values,
    group_maxima,
    load_pairs,
    power_of_two,
    power_of_two_exponent,
    rounded,
    spread_groups,
    store_pairs,
)

FP4_GROUP = tl.constexpr(16)
FP4_TARGET_MIN = tl.constexpr(2.0**-9)
KEY_GROUP = tl.constexpr(32)
KEY_TARGET_MIN = tl.constexpr(2.0**-126)
KEYS_EACH, KEYS_MANY = 16, 132
"""Rows of a program that holds all of the key's matrix; as many such programs as an H200 has processors."""
KEYS_EACH_OF_MANY, STEP_OF_MANY = 64, 64
"""Rows of a program, and channels of its steps, where there are more of them: the matrix is read less often. Not where
a row's bits must not depend on how many there are."""


@triton.jit
def _member(raw, ring, source, pair, WIDTH: tl.constexpr):
    """Even and odd channels of the values and gate scores of a raw row (source >= 0) or a ring place, [1, HALF]."""
    base = raw
    place = source
    if source < 0:
        base = ring
        place = -1 - source
    start = place.to(tl.int64) * WIDTH
    even, odd = load_pairs(base, start + pair, pair >= 0)
    gate_even, gate_odd = load_pairs(base, start + WIDTH // 2 + pair, pair >= 0)
    return even, odd, gate_even, gate_odd


@triton.jit
def _mixed(value, total, highest, other, score):
    """One more member of a running softmax, channel by channel."""
    higher = tl.maximum(highest, score)
    keep = tl.exp(highest - higher)
    weight = tl.exp(score - higher)
    return value * keep + other * weight, total * keep + weight, higher


@triton.jit
def _pooled(raw, ring, earlier, row, pair, WIDTH: tl.constexpr, RATIO: tl.constexpr):
    """Even and odd channels [1, HALF] of the group that ends with `row`."""
    if RATIO == 1:
        even, odd = load_pairs(raw, row.to(tl.int64) * (WIDTH // 2) + pair, pair >= 0)
    else:
        even, odd, high_even, high_odd = _member(raw, ring, row, pair, WIDTH)
        total_even = even * 0.0 + 1.0
        total_odd = odd * 0.0 + 1.0
        for member in tl.static_range(RATIO - 1):
            source = tl.load(earlier + row * (RATIO - 1) + member)
            value_even, value_odd, score_even, score_odd = _member(raw, ring, source, pair, WIDTH)
            even, total_even, high_even = _mixed(even, total_even, high_even, value_even, score_even)
            odd, total_odd, high_odd = _mixed(odd, total_odd, high_odd, value_odd, score_odd)
        even = even / total_even
        odd = odd / total_odd
    return even, odd


@triton.jit
def _turned(even, odd, cos, sin, row, pair, there, PAIRS: tl.constexpr, HALF: tl.constexpr, dtype):
    """row [ROWS, 1], pair [1, HALF]"""
    turning = there & (pair >= HALF - PAIRS)
    angle = row * PAIRS + pair - (HALF - PAIRS)
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    return rounded(even * c - odd * s, dtype), rounded(odd * c + even * s, dtype)


@triton.jit
def entry_rows_kernel(
    raw,
    ring,
    earlier,
    norm,
    cos,
    sin,
    destinations,
    latents,
    entries,
    eps,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    RATIO: tl.constexpr,
    EARLY: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    pair = tl.arange(0, HALF)[None, :]
    norm_even, norm_odd = load_pairs(norm, pair, pair >= 0)
    begin_early(EARLY)
    row = tl.program_id(0)
    destination = tl.load(destinations + row)
    if destination >= 0:
        dtype = norm.dtype.element_ty
        even, odd = _pooled(raw, ring, earlier, row, pair, WIDTH, RATIO)
        even = rounded(even, dtype)
        odd = rounded(odd, dtype)
        root = 1.0 / tl.sqrt(tl.sum(tl.sum(even * even + odd * odd, 1), 0) / WIDTH + eps)
        even = rounded(even * root * norm_even, dtype)
        odd = rounded(odd * root * norm_odd, dtype)
        store_pairs(latents, row.to(tl.int64) * HALF + pair, even, odd, pair >= 0)
        even, odd = _turned(even, odd, cos, sin, row, pair, pair >= 0, PAIRS, HALF, dtype)

        target = tl.maximum(group_maxima(even, odd, 1, HALF, FP4_GROUP) / 6.0, FP4_TARGET_MIN)
        codes = e4m3_bytes(tl.minimum(target, 448.0))
        scale = spread_groups(e4m3_values(codes.to(tl.int32)), 1, HALF, FP4_GROUP)
        low = e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))
        high = e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))
        record = entries + destination.to(tl.int64) * (HALF + WIDTH // FP4_GROUP)
        tl.store(record + pair, (low | (high << 4)).to(tl.uint8))
        tl.store(record + HALF + tl.arange(0, WIDTH // FP4_GROUP)[None, :], codes)


@triton.jit
def _with_product(total, a, b, FAST: tl.constexpr):
    """total + a · bᵀ"""
    if FAST:
        return tl.dot(a, tl.trans(b), total)
    else:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), total, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def key_rows_kernel(
    latents,
    weight,
    norm,
    cos,
    sin,
    destinations,
    keys,
    rows,
    eps,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of rows: the key's product, then its norm, turn and record. With STEP = LATENT the whole matrix is on its
    way before the latents are there."""
    HALF: tl.constexpr = WIDTH // 2
    channel = tl.arange(0, STEP)
    right = weight + tl.arange(0, WIDTH)[:, None] * LATENT + channel[None, :]
    if STEP == LATENT:
        b = tl.load(right)
    begin_early(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    destination = tl.load(destinations + row, mask=row < rows, other=-1)
    there = (destination >= 0)[:, None]  # The latents of other rows were not written.
    left = latents + row.to(tl.int64)[:, None] * LATENT + channel[None, :]
    product = tl.zeros((ROWS, WIDTH), tl.float32)
    if STEP == LATENT:
        product = _with_product(product, tl.load(left, mask=there, other=0.0), b, FAST)
    else:
        for start in range(0, LATENT, STEP):
            a = tl.load(left + start, mask=there, other=0.0)
            product = _with_product(product, a, tl.load(right + start), FAST)
    dtype = norm.dtype.element_ty
    even, odd = tl.split(rounded(product, dtype).reshape(ROWS, HALF, 2))
    pair = tl.arange(0, HALF)[None, :]
    root = (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / WIDTH + eps))[:, None]
    norm_even, norm_odd = load_pairs(norm, pair, pair >= 0)
    even = rounded(even * root * norm_even, dtype)
    odd = rounded(odd * root * norm_odd, dtype)
    even, odd = _turned(even, odd, cos, sin, row[:, None], pair, there, PAIRS, HALF, dtype)

    exponent = power_of_two_exponent(tl.maximum(group_maxima(even, odd, ROWS, HALF, KEY_GROUP) / 6.0, KEY_TARGET_MIN))
    inverse = spread_groups(power_of_two(254 - exponent), ROWS, HALF, KEY_GROUP)
    low = e2m1_codes(tl.clamp(even * inverse, -6.0, 6.0))
    high = e2m1_codes(tl.clamp(odd * inverse, -6.0, 6.0))
    record = keys + destination.to(tl.int64)[:, None] * (HALF + WIDTH // KEY_GROUP)
    tl.store(record + pair, (low | (high << 4)).to(tl.uint8), mask=there)
    tl.store(record + HALF + tl.arange(0, WIDTH // KEY_GROUP)[None, :], exponent.to(tl.uint8), mask=there)


@triton.jit
def keep_rows_kernel(raw, places, ring, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place >= 0:
        channel = tl.arange(0, BLOCK)
        value = tl.load(raw + row * WIDTH + channel, mask=channel < WIDTH)
        tl.store(ring + place.to(tl.int64) * WIDTH + channel, value, mask=channel < WIDTH)


def write_global_entries(
    raw: Tensor,
    ring: Tensor | None,
    earlier: Tensor | None,
    norm: Tensor,
    key_weight: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    destinations: Tensor,
    entries: Tensor,
    keys: Tensor,
    *,
    eps: float,
) -> None:
    """As `whalepod.kernels.global_entries.write_global_entries`, for bfloat16 on a GPU, or anything in Triton's
    interpreter."""
    rows, width, key_width = raw.shape[0], norm.shape[0], key_norm.shape[0]
    if rows == 0:
        return
    latents = torch.empty(rows, width, dtype=norm.dtype, device=raw.device)
    early = comes_early(raw, rows)
    entry_rows_kernel[(rows,)](
        raw.contiguous(),
        raw if ring is None else ring,
        destinations if earlier is None else earlier,
        norm,
        cos,
        sin,
        destinations,
        latents,
        entries,
        eps,
        WIDTH=width,
        PAIRS=cos.shape[1],
        RATIO=1 if earlier is None else earlier.shape[1] + 1,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    few = tiled() or rows <= KEYS_EACH * KEYS_MANY
    each = KEYS_EACH if few else KEYS_EACH_OF_MANY
    key_rows_kernel[(triton.cdiv(rows, each),)](
        latents,
        key_weight.contiguous(),
        key_norm,
        cos,
        sin,
        destinations,
        keys,
        rows,
        eps,
        WIDTH=key_width,
        LATENT=width,
        STEP=width if few else math.gcd(width, STEP_OF_MANY),
        PAIRS=cos.shape[1],
        ROWS=each,
        FAST=raw.is_cuda,
        EARLY=raw.is_cuda,
        num_warps=8,
        num_stages=4,
        launch_pdl=raw.is_cuda,
    )


def keep_raw_rows(raw: Tensor, places: Tensor, ring: Tensor) -> None:
    """As `whalepod.kernels.global_entries.keep_raw_rows`."""
    rows, width = raw.shape
    if rows:
        keep_rows_kernel[(rows,)](
            raw.contiguous(), places, ring, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
        )
