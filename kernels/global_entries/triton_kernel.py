"""Entries of global KV and their index keys in one pass, in Triton.

A program takes ROWS rows and goes over their channels twice: once for the mean square, once to normalise, pack and
multiply with the key's matrix, chunk by chunk. The channels that turn all lie in the last chunk. Rows whose group does
not end here are computed and not written: there are at most as many as there are others.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import (
    e2m1_codes,
    e4m3_bytes,
    e4m3_values,
    group_maxima,
    power_of_two,
    power_of_two_exponent,
    rounded,
    spread_groups,
)

FP4_GROUP = tl.constexpr(16)
FP4_TARGET_MIN = tl.constexpr(2.0**-9)
KEY_GROUP = tl.constexpr(32)
KEY_TARGET_MIN = tl.constexpr(2.0**-126)
ROWS_EACH = 16


@triton.jit
def _member(raw, ring, source, column, there, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Channels `column` of values and gate scores of raw rows (source >= 0) or ring places."""
    own = source >= 0
    at = tl.where(own, source, -1 - source).to(tl.int64)[:, None] * STRIDE + column[None, :]
    mine = there[:, None] & own[:, None]
    other = there[:, None] & (source < 0)[:, None]
    value = tl.load(raw + at, mask=mine, other=0.0) + tl.load(ring + at, mask=other, other=0.0)
    score = tl.load(raw + at + WIDTH, mask=mine, other=0.0) + tl.load(ring + at + WIDTH, mask=other, other=0.0)
    return value, score


@triton.jit
def _pooled(raw, ring, earlier, row, column, there, WIDTH: tl.constexpr, RATIO: tl.constexpr, dtype):
    """Channels `column` of the groups that end with `row`, rounded to `dtype`."""
    STRIDE: tl.constexpr = WIDTH if RATIO == 1 else 2 * WIDTH
    if RATIO == 1:
        at = row.to(tl.int64)[:, None] * STRIDE + column[None, :]
        pooled = tl.load(raw + at, mask=there[:, None], other=0.0)
    else:
        value, highest = _member(raw, ring, row, column, there, WIDTH, STRIDE)
        total = value * 0.0 + 1.0
        for member in tl.static_range(RATIO - 1):
            source = tl.load(earlier + row * (RATIO - 1) + member, mask=there, other=0)
            other, score = _member(raw, ring, source, column, there, WIDTH, STRIDE)
            higher = tl.maximum(highest, score)
            keep = tl.exp(highest - higher)
            weight = tl.exp(score - higher)
            value = value * keep + other * weight
            total = total * keep + weight
            highest = higher
        pooled = value / total
    return rounded(pooled, dtype)


@triton.jit
def _turned(even, odd, cos, sin, row, pair, there, PAIRS: tl.constexpr, dtype):
    turning = there[:, None] & (pair >= 0)[None, :]
    at = row[:, None] * PAIRS + pair[None, :]
    c = tl.load(cos + at, mask=turning, other=1.0)
    s = tl.load(sin + at, mask=turning, other=0.0)
    return rounded(even * c - odd * s, dtype), rounded(odd * c + even * s, dtype)


@triton.jit
def _write_fp4(record, even, odd, first, there, ROWS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Pack channels first … first + 2 · HALF - 1 into `FP4_BLOCK16` records."""
    target = tl.maximum(group_maxima(even, odd, ROWS, HALF, FP4_GROUP) / 6.0, FP4_TARGET_MIN)
    codes = e4m3_bytes(tl.minimum(target, 448.0))
    scale = spread_groups(e4m3_values(codes.to(tl.int32)), ROWS, HALF, FP4_GROUP)
    low = e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))
    high = e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))
    tl.store(
        record[:, None] + first // 2 + tl.arange(0, HALF)[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=there[:, None],
    )
    group = first // FP4_GROUP + tl.arange(0, 2 * HALF // FP4_GROUP)
    tl.store(record[:, None] + WIDTH // 2 + group[None, :], codes, mask=there[:, None])


@triton.jit
def _write_key(record, even, odd, there, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Pack whole index keys into `MXFP4_BLOCK32` records."""
    target = tl.maximum(group_maxima(even, odd, ROWS, HALF, KEY_GROUP) / 6.0, KEY_TARGET_MIN)
    exponent = power_of_two_exponent(target)
    scale = spread_groups(power_of_two(exponent), ROWS, HALF, KEY_GROUP)
    low = e2m1_codes(tl.clamp(even / scale, -6.0, 6.0))
    high = e2m1_codes(tl.clamp(odd / scale, -6.0, 6.0))
    tl.store(record[:, None] + tl.arange(0, HALF)[None, :], (low | (high << 4)).to(tl.uint8), mask=there[:, None])
    group = tl.arange(0, 2 * HALF // KEY_GROUP)
    tl.store(record[:, None] + HALF + group[None, :], exponent.to(tl.uint8), mask=there[:, None])


@triton.jit
def global_entries_kernel(
    raw,
    ring,
    earlier,
    norm,
    key_weight,
    key_norm,
    cos,
    sin,
    destinations,
    entries,
    keys,
    rows,
    eps,
    WIDTH: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    FAST: tl.constexpr,
):
    dtype = key_weight.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    destination = tl.load(destinations + row, mask=row < rows, other=-1)
    there = destination >= 0
    if tl.max(destination, 0) >= 0:
        HALF: tl.constexpr = CHUNK // 2
        KEY_HALF: tl.constexpr = KEY_WIDTH // 2
        channel = tl.arange(0, HALF)
        squares = tl.zeros((ROWS,), tl.float32)
        for chunk in range(0, WIDTH, CHUNK):
            even = _pooled(raw, ring, earlier, row, chunk + 2 * channel, there, WIDTH, RATIO, dtype)
            odd = _pooled(raw, ring, earlier, row, chunk + 2 * channel + 1, there, WIDTH, RATIO, dtype)
            squares += tl.sum(even * even + odd * odd, 1)
        root = (1.0 / tl.sqrt(squares / WIDTH + eps))[:, None]

        place = destination.to(tl.int64)
        record = entries + place * (WIDTH // 2 + WIDTH // FP4_GROUP)
        key_channel = tl.arange(0, KEY_HALF)
        key_even = tl.zeros((ROWS, KEY_HALF), tl.float32)
        key_odd = tl.zeros((ROWS, KEY_HALF), tl.float32)
        for chunk in range(0, WIDTH, CHUNK):
            column = chunk + 2 * channel
            even = _pooled(raw, ring, earlier, row, column, there, WIDTH, RATIO, dtype) * root
            odd = _pooled(raw, ring, earlier, row, column + 1, there, WIDTH, RATIO, dtype) * root
            even = rounded(even * tl.load(norm + column)[None, :].to(tl.float32), dtype)
            odd = rounded(odd * tl.load(norm + column + 1)[None, :].to(tl.float32), dtype)
            at = key_weight + 2 * key_channel[None, :] * WIDTH + column[:, None]
            if FAST:
                left_even, left_odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
                key_even = tl.dot(left_even, tl.load(at), key_even)
                key_even = tl.dot(left_odd, tl.load(at + 1), key_even)
                key_odd = tl.dot(left_even, tl.load(at + WIDTH), key_odd)
                key_odd = tl.dot(left_odd, tl.load(at + WIDTH + 1), key_odd)
            else:
                key_even += tl.dot(even, tl.load(at).to(tl.float32)) + tl.dot(odd, tl.load(at + 1).to(tl.float32))
                key_odd += tl.dot(even, tl.load(at + WIDTH).to(tl.float32))
                key_odd += tl.dot(odd, tl.load(at + WIDTH + 1).to(tl.float32))
            even, odd = _turned(even, odd, cos, sin, row, column // 2 - (WIDTH // 2 - PAIRS), there, PAIRS, dtype)
            _write_fp4(record, even, odd, chunk, there, ROWS, HALF, WIDTH)

        even, odd = rounded(key_even, dtype), rounded(key_odd, dtype)
        root = (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / KEY_WIDTH + eps))[:, None]
        even = rounded(even * root * tl.load(key_norm + 2 * key_channel)[None, :].to(tl.float32), dtype)
        odd = rounded(odd * root * tl.load(key_norm + 2 * key_channel + 1)[None, :].to(tl.float32), dtype)
        even, odd = _turned(even, odd, cos, sin, row, key_channel - (KEY_HALF - PAIRS), there, PAIRS, dtype)
        _write_key(keys + place * (KEY_HALF + KEY_WIDTH // KEY_GROUP), even, odd, there, ROWS, KEY_HALF)


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
    num_warps: int = 4,
) -> None:
    """As `whalepod.kernels.global_entries.write_global_entries`, for bfloat16 on a GPU, or anything in Triton's
    interpreter."""
    rows, width = raw.shape[0], norm.shape[0]
    if rows == 0:
        return
    chunk = min(64, width)
    assert 2 * cos.shape[1] <= chunk, "the channels that turn must fit into one chunk"
    global_entries_kernel[(triton.cdiv(rows, ROWS_EACH),)](
        raw.contiguous(),
        raw if ring is None else ring,
        destinations if earlier is None else earlier,
        norm,
        key_weight,
        key_norm,
        cos,
        sin,
        destinations,
        entries,
        keys,
        rows,
        eps,
        WIDTH=width,
        KEY_WIDTH=key_norm.shape[0],
        PAIRS=cos.shape[1],
        RATIO=1 if earlier is None else earlier.shape[1] + 1,
        ROWS=ROWS_EACH,
        CHUNK=chunk,
        FAST=raw.is_cuda,
        num_warps=num_warps,
    )


def keep_raw_rows(raw: Tensor, places: Tensor, ring: Tensor) -> None:
    """As `whalepod.kernels.global_entries.keep_raw_rows`."""
    rows, width = raw.shape
    if rows:
        keep_rows_kernel[(rows,)](
            raw.contiguous(), places, ring, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4
        )
