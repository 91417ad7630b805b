"""Index scores over packed MXFP4 keys in Triton: rows of one sequence share every key that is read.

A tile of keys is the left operand, so that a thread holds whole rows of heads and sums them itself. Keys and queries
are multiplied as FP8: E2M1 is a subset of E4M3, and a key's four scales become one, the largest, by moving the other
groups' exponents. That is exact while the scales of a key spread by at most 2^11. A group further below counts as 0: it
is less than 2^-11 of the key. The same holds for the groups of a query head, which end in E4M3's subnormal numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.numerics import tiled

SPREAD_MAX = tl.constexpr(11)
RECORD_BYTES = tl.constexpr(68)
CODE_BYTES = tl.constexpr(64)


def to_fp8_asm(small: str, large: str) -> str:
    """Codes as FP8 by moving bits. $2: four bytes of two E2M1 codes -> $0: even channels, $1: odd channels.

    small, large   operands with the E4M3 bytes of magnitudes 0 … 3 and 4 … 7

    An odd code's sign lies where its byte's will, an even one's four bits below.
    """
    return f"""
{{
.reg .b32 select, low, high, even, odd, sign;
and.b32 select, $2, 0x77777777;
prmt.b32 low, {small}, {large}, select;
shr.u32 select, select, 16;
prmt.b32 high, {small}, {large}, select;
prmt.b32 even, low, high, 0x6420;
prmt.b32 odd, low, high, 0x7531;
shl.b32 sign, $2, 4;
lop3.b32 $0, sign, 0x80808080, even, 0xEA;
lop3.b32 $1, $2, 0x80808080, odd, 0xEA;
}}
"""


TO_FP8_ASM = tl.constexpr(to_fp8_asm("$3", "$7"))


@triton.jit
def _key_places(table, tile_start, visible, ENTRIES: tl.constexpr, KEYS: tl.constexpr):
    entry = tile_start + tl.arange(0, KEYS)
    blocks = tl.load(table + entry // ENTRIES, mask=entry < visible, other=0)
    return entry, blocks.to(tl.int64) * ENTRIES + entry % ENTRIES


@triton.jit
def fp8_keys(codes, shifts, KEYS: tl.constexpr, FAST: tl.constexpr):
    """codes int8 [KEYS, 64], shifts int32 [KEYS, 4] -> even, odd channels times 2^(6 - shift), as E4M3."""
    near = shifts <= SPREAD_MAX
    steps = 6 - shifts
    if FAST:
        small = tl.where(near, 0x3C383000 + steps * 0x08080800, 0)
        large = tl.where(near, 0x4C484440 + steps * 0x08080808, 0)
        small = tl.broadcast_to(small[:, :, None], (KEYS, 4, 16)).reshape(KEYS, CODE_BYTES)
        large = tl.broadcast_to(large[:, :, None], (KEYS, 4, 16)).reshape(KEYS, CODE_BYTES)
        even, odd = tl.inline_asm_elementwise(
            TO_FP8_ASM,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [codes, small, large],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return even.to(tl.float8e4nv, bitcast=True), odd.to(tl.float8e4nv, bitcast=True)
    else:
        scale = tl.where(near, tl.exp2(steps.to(tl.float32)), 0.0)
        scale = tl.broadcast_to(scale[:, :, None], (KEYS, 4, 16)).reshape(KEYS, CODE_BYTES)
        return _e2m1_values(codes) * scale, _e2m1_values(codes >> 4) * scale


@triton.jit
def _e2m1_values(codes):
    """Low nibbles of int8 -> float32."""
    bits = codes.to(tl.int32)
    magnitude = (((bits & 7) << 22).to(tl.float32, bitcast=True)) * 2.0**63 * 2.0**63
    return tl.where((bits & 8) != 0, -magnitude, magnitude)


@triton.jit
def query_tile(queries, weights, row_start, row_count, ROWS: tl.constexpr, HEADS: tl.constexpr, FAST: tl.constexpr):
    """Heads of rows -> even, odd channels [ROWS · HEADS, 64] and the heads' weights. A head is scaled by a power of two
    to at most 256, which its weight makes good."""
    head = tl.arange(0, ROWS * HEADS)
    there = head < row_count * HEADS
    at = (row_start.to(tl.int64) * HEADS + head)[:, None] * 128 + 2 * tl.arange(0, 64)[None, :]
    even = tl.load(queries + at, mask=there[:, None], other=0.0).to(tl.float32)
    odd = tl.load(queries + at + 1, mask=there[:, None], other=0.0).to(tl.float32)
    weight = tl.load(weights + row_start * HEADS + head, mask=there, other=0.0)
    highest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
    exponent = (tl.maximum(highest, 1e-30).to(tl.int32, bitcast=True) >> 23) - 127
    scale = ((134 - exponent) << 23).to(tl.float32, bitcast=True)
    weight = weight * ((120 + exponent) << 23).to(tl.float32, bitcast=True)
    even = even * scale[:, None]
    odd = odd * scale[:, None]
    if FAST:
        return even.to(tl.float8e4nv), odd.to(tl.float8e4nv), weight
    else:
        return even, odd, weight


@triton.jit
def weighted_sums(products, weights, ROWS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr):
    """products [KEYS, ROWS · HEADS] -> Σ over heads of weight · max(0, product) [KEYS, ROWS]."""
    terms = tl.maximum(products, 0.0) * weights[None, :]
    return tl.sum(terms.reshape(KEYS, ROWS, HEADS), 2)


@triton.jit
def _score_rows(
    keys_even,
    keys_odd,
    query_even,
    query_odd,
    weight,
    key_scale,
    scores,
    stride,
    entry,
    row_start,
    row_count,
    visible,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    products = tl.dot(keys_even, tl.trans(query_even))
    products = tl.dot(keys_odd, tl.trans(query_odd), products)
    sums = weighted_sums(products, weight, ROWS, HEADS, KEYS) * key_scale[:, None]
    row = tl.arange(0, ROWS)
    seen = tl.load(visible + row_start + row, mask=row < row_count, other=0)
    sums = tl.where(entry[:, None] < seen[None, :], sums, float("-inf"))
    target = (row_start + row).to(tl.int64)[None, :] * stride + entry[:, None]
    tl.store(scores + target, sums, mask=(row < row_count)[None, :] & (entry < stride)[:, None])


@triton.jit
def index_scores_kernel(
    queries,
    weights,
    keys,
    tables,
    table_stride,
    visible,
    group_starts,
    group_counts,
    group_sequences,
    scores,
    stride,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Program (group, part): scores of PARTS times ROWS rows of one sequence, for every so many-th tile of keys."""
    group = tl.program_id(0)
    start = tl.load(group_starts + group)
    count = tl.load(group_counts + group)
    table = tables + tl.load(group_sequences + group).to(tl.int64) * table_stride
    evens, odds, head_weights = (), (), ()
    for part in tl.static_range(PARTS):
        query_even, query_odd, weight = query_tile(
            queries, weights, start + part * ROWS, tl.minimum(count - part * ROWS, ROWS), ROWS, HEADS, FAST
        )
        evens, odds, head_weights = evens + (query_even,), odds + (query_odd,), head_weights + (weight,)  # noqa: RUF005
    newest = tl.load(visible + start + count - 1)
    tile = tl.program_id(1)
    for tile_start in range(tile * KEYS, newest, tl.num_programs(1) * KEYS):
        entry, place = _key_places(table, tile_start, newest, ENTRIES, KEYS)
        there = entry < newest
        record = keys + place[:, None] * RECORD_BYTES
        codes = tl.load(
            record.to(tl.pointer_type(tl.int8)) + tl.multiple_of(tl.arange(0, CODE_BYTES), 4)[None, :],
            mask=there[:, None],
            other=0,
        )
        scale = tl.load(record + CODE_BYTES + tl.arange(0, 4)[None, :], mask=there[:, None], other=0).to(tl.int32)
        largest = tl.max(scale, 1)
        even, odd = fp8_keys(codes, largest[:, None] - scale, KEYS, FAST)
        key_scale = tl.maximum(largest - 6, 1) << 23
        key_scale = key_scale.to(tl.float32, bitcast=True)
        for part in tl.static_range(PARTS):
            _score_rows(
                even,
                odd,
                evens[part],
                odds[part],
                head_weights[part],
                key_scale,
                scores,
                stride,
                entry,
                start + part * ROWS,
                count - part * ROWS,
                visible,
                ROWS,
                HEADS,
                KEYS,
            )


def packed_index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    visible: Tensor,
    groups: Tensor,
    *,
    entries_per_block: int,
    group_rows: int,
    entries_max: int,
) -> Tensor:
    """As `whalepod.kernels.packed_index_scores`, for bfloat16 queries on a GPU, or anything in Triton's interpreter."""
    rows, heads, _ = queries.shape
    scores = torch.empty(rows, entries_max, dtype=torch.float32, device=queries.device)
    if rows == 0 or entries_max == 0:
        return scores
    each = 2 if tiled() else min(2, group_rows)
    count, sizes = groups.shape[1], launch_sizes("index_scores", queries, rows=rows, shape=heads)
    # As many programs as run at once: a second, partial wave costs more than it gains.
    parts = min(triton.cdiv(entries_max, sizes["KEYS"]), max(1, sizes["programs"] // count))
    index_scores_kernel[(count, parts)](
        queries.contiguous(),
        weights,
        keys,
        tables,
        tables.stride(0),
        visible,
        groups[0],
        groups[1],
        groups[2],
        scores,
        scores.stride(0),
        ENTRIES=entries_per_block,
        HEADS=heads,
        ROWS=each,
        PARTS=triton.cdiv(group_rows, each),
        KEYS=sizes["KEYS"],
        FAST=queries.is_cuda,
        num_warps=sizes["num_warps"],
        num_stages=sizes["num_stages"],
    )
    return scores
