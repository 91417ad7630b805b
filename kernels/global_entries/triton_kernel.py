"""Entries of global KV and their index keys in Triton: a pass over the rows on either side of the key's product.

    raw rows ─ pool, norm ─┬─ turn, pack ─▶ entry
                           └─▶ latent ─ product (library) ─▶ key ─ norm, turn, pack ─▶ index key

Programs whose group does not end end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.linear import linear
from whalepod.kernels.packing_kernel import (
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
KEYS_EACH = 4


@triton.jit
def _member(raw, ring, source, column, WIDTH: tl.constexpr):
    """Even and odd channels of the values and gate scores of a raw row (source >= 0) or a ring place, [1, HALF]."""
    own = source >= 0
    start = tl.where(own, source, -1 - source).to(tl.int64) * (2 * WIDTH)
    everywhere = column >= 0
    even, odd = load_pairs(raw, start + column, everywhere & own)
    ring_even, ring_odd = load_pairs(ring, start + column, everywhere & (source < 0))
    gate_even, gate_odd = load_pairs(raw, start + WIDTH + column, everywhere & own)
    ring_gate_even, ring_gate_odd = load_pairs(ring, start + WIDTH + column, everywhere & (source < 0))
    return even + ring_even, odd + ring_odd, gate_even + ring_gate_even, gate_odd + ring_gate_odd


@triton.jit
def _mixed(value, total, highest, other, score):
    """One more member of a running softmax, channel by channel."""
    higher = tl.maximum(highest, score)
    keep = tl.exp(highest - higher)
    weight = tl.exp(score - higher)
    return value * keep + other * weight, total * keep + weight, higher


@triton.jit
def _pooled(raw, ring, earlier, row, column, WIDTH: tl.constexpr, RATIO: tl.constexpr):
    """Even and odd channels [1, HALF] of the group that ends with `row`."""
    if RATIO == 1:
        even, odd = load_pairs(raw, row.to(tl.int64) * WIDTH + column, column >= 0)
    else:
        even, odd, high_even, high_odd = _member(raw, ring, row, column, WIDTH)
        total_even = even * 0.0 + 1.0
        total_odd = odd * 0.0 + 1.0
        for member in tl.static_range(RATIO - 1):
            source = tl.load(earlier + row * (RATIO - 1) + member)
            value_even, value_odd, score_even, score_odd = _member(raw, ring, source, column, WIDTH)
            even, total_even, high_even = _mixed(even, total_even, high_even, value_even, score_even)
            odd, total_odd, high_odd = _mixed(odd, total_odd, high_odd, value_odd, score_odd)
        even = even / total_even
        odd = odd / total_odd
    return even, odd


@triton.jit
def _turned(even, odd, cos, sin, row, pair, there, PAIRS: tl.constexpr, dtype):
    """row [ROWS, 1], pair [1, HALF]"""
    turning = there & (pair >= 0)
    c = tl.load(cos + row * PAIRS + pair, mask=turning, other=1.0)
    s = tl.load(sin + row * PAIRS + pair, mask=turning, other=0.0)
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
):
    row = tl.program_id(0)
    destination = tl.load(destinations + row)
    if destination >= 0:
        HALF: tl.constexpr = WIDTH // 2
        dtype = norm.dtype.element_ty
        column = 2 * tl.arange(0, HALF)[None, :]
        even, odd = _pooled(raw, ring, earlier, row, column, WIDTH, RATIO)
        even = rounded(even, dtype)
        odd = rounded(odd, dtype)
        root = 1.0 / tl.sqrt(tl.sum(tl.sum(even * even + odd * odd, 1), 0) / WIDTH + eps)
        norm_even, norm_odd = load_pairs(norm, column, column >= 0)
        even = rounded(even * root * norm_even, dtype)
        odd = rounded(odd * root * norm_odd, dtype)
        store_pairs(latents, row.to(tl.int64) * WIDTH + column, even, odd, column >= 0)
        even, odd = _turned(even, odd, cos, sin, row, column // 2 - (HALF - PAIRS), column >= 0, PAIRS, dtype)

        target = tl.maximum(group_maxima(even, odd, 1, HALF, FP4_GROUP) / 6.0, FP4_TARGET_MIN)
        codes = e4m3_bytes(tl.minimum(target, 448.0))
        scale = spread_groups(e4m3_values(codes.to(tl.int32)), 1, HALF, FP4_GROUP)
        low = e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))
        high = e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))
        record = entries + destination.to(tl.int64) * (HALF + WIDTH // FP4_GROUP)
        tl.store(record + column // 2, (low | (high << 4)).to(tl.uint8))
        tl.store(record + HALF + tl.arange(0, WIDTH // FP4_GROUP)[None, :], codes)


@triton.jit(do_not_specialize=["rows"])
def key_rows_kernel(
    projected,
    norm,
    cos,
    sin,
    destinations,
    keys,
    rows,
    eps,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    HALF: tl.constexpr = WIDTH // 2
    dtype = norm.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    destination = tl.load(destinations + row, mask=row < rows, other=-1)
    there = (destination >= 0)[:, None]
    column = 2 * tl.arange(0, HALF)[None, :]
    even, odd = load_pairs(projected, row.to(tl.int64)[:, None] * WIDTH + column, there)
    root = (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / WIDTH + eps))[:, None]
    norm_even, norm_odd = load_pairs(norm, column, column >= 0)
    even = rounded(even * root * norm_even, dtype)
    odd = rounded(odd * root * norm_odd, dtype)
    even, odd = _turned(even, odd, cos, sin, row[:, None], column // 2 - (HALF - PAIRS), there, PAIRS, dtype)

    exponent = power_of_two_exponent(tl.maximum(group_maxima(even, odd, ROWS, HALF, KEY_GROUP) / 6.0, KEY_TARGET_MIN))
    scale = spread_groups(power_of_two(exponent), ROWS, HALF, KEY_GROUP)
    low = e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))
    high = e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))
    record = keys + destination.to(tl.int64)[:, None] * (HALF + WIDTH // KEY_GROUP)
    tl.store(record + column // 2, (low | (high << 4)).to(tl.uint8), mask=there)
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
        num_warps=2,
    )
    key_rows_kernel[(triton.cdiv(rows, KEYS_EACH),)](
        linear(latents, key_weight),
        key_norm,
        cos,
        sin,
        destinations,
        keys,
        rows,
        eps,
        WIDTH=key_width,
        PAIRS=cos.shape[1],
        ROWS=KEYS_EACH,
        num_warps=2,
    )


def keep_raw_rows(raw: Tensor, places: Tensor, ring: Tensor) -> None:
    """As `whalepod.kernels.global_entries.keep_raw_rows`."""
    rows, width = raw.shape
    if rows:
        keep_rows_kernel[(rows,)](
            raw.contiguous(), places, ring, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
        )
