"""Attention over packed rows for Hopper, with the work of its warps spelled out.

One program a query row (or a part of its keys). Four warps fetch packed records, turn them into bfloat16 and put tiles
of keys into a ring of two in shared memory; eight warps multiply, exponentiate and sum. Even and odd channels lie in two
tiles of half the width, as in `triton_kernel.py`, whose arguments and results these kernels share.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_kernel import combine_parts, parts_of, scratch
from .unpacking import FP4_EXPONENT, FP8_EXPONENT, SHIFT, UNPACK_FP4_ASM, UNPACK_FP8_ASM

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_REGISTERS = gl.constexpr(120)
STAGES = gl.constexpr(2)


@gluon.jit
def _load_fp8(records, rows, count, KEYS: gl.constexpr, HALF: gl.constexpr, WARPS: gl.constexpr):
    """Raw pairs of codes [KEYS, HALF] int16 and scale bytes [KEYS, HALF // 16] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = 2 * HALF + HALF // 16
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    words = gl.load(
        (records + gl.multiple_of(start, 16)[:, None]).to(gl.pointer_type(gl.int16), bitcast=True) + columns[None, :],
        mask=(keys < count)[:, None], other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 16, gl.SliceLayout(0, groups))
    key = gl.arange(0, KEYS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (2 * HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return words, scales


@gluon.jit
def _unpack_fp8(words, scale_bytes, KEYS: gl.constexpr, HALF: gl.constexpr):
    exponents = gl.minimum(scale_bytes.to(gl.int32) + (FP8_EXPONENT - SHIFT), 254)
    scales = (exponents << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    spread = gl.expand_dims(scales, 2).broadcast_to((KEYS, HALF // 16, 16)).reshape((KEYS, HALF))
    spread = gl.convert_layout(spread, words.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        UNPACK_FP8_ASM, "=r,=r,r,r", [words, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)


@gluon.jit
def _load_fp4(records, rows, count, KEYS: gl.constexpr, HALF: gl.constexpr, WARPS: gl.constexpr):
    """Raw bytes of two codes [KEYS, HALF] int8 and scale bytes [KEYS, HALF // 8] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = HALF + HALF // 8
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    codes = gl.load(
        records.to(gl.pointer_type(gl.int8), bitcast=True) + gl.multiple_of(start, 16)[:, None] + columns[None, :],
        mask=(keys < count)[:, None], other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 8, gl.SliceLayout(0, groups))
    key = gl.arange(0, KEYS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return codes, scales


@gluon.jit
def _unpack_fp4(codes, scale_bytes, KEYS: gl.constexpr, HALF: gl.constexpr):
    scales = scale_bytes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * 2.0 ** (FP4_EXPONENT - SHIFT)
    scales = scales.to(gl.bfloat16)
    spread = gl.expand_dims(scales, 2).broadcast_to((KEYS, HALF // 8, 8)).reshape((KEYS, HALF))
    spread = gl.convert_layout(spread, codes.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        UNPACK_FP4_ASM, "=r,=r,=r,=r,r,r,r", [codes, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)


@gluon.jit
def _put(evens, odds, stage, start, even, odd):
    """Store rows `start` … of a tile, where its channels are even and odd."""
    evens.index(stage).slice(start, even.shape[0], 0).store(even)
    odds.index(stage).slice(start, odd.shape[0], 0).store(odd)


@gluon.jit
def _produce_window(
    evens, odds, filled, emptied, window, base, ring, at, count, turn, KEYS: gl.constexpr, HALF: gl.constexpr
):
    """Fill a tile with the window rows of positions at, at + 1, …; a quarter at a time, for want of registers."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    EACH: gl.constexpr = KEYS // 4
    key = gl.arange(0, EACH, gl.SliceLayout(1, flat))
    words_0, scales_0 = _load_fp8(window, base + (at + key) % ring, count, EACH, HALF, PRODUCER_WARPS)
    words_1, scales_1 = _load_fp8(window, base + (at + EACH + key) % ring, count - EACH, EACH, HALF, PRODUCER_WARPS)
    words_2, scales_2 = _load_fp8(
        window, base + (at + 2 * EACH + key) % ring, count - 2 * EACH, EACH, HALF, PRODUCER_WARPS)
    words_3, scales_3 = _load_fp8(
        window, base + (at + 3 * EACH + key) % ring, count - 3 * EACH, EACH, HALF, PRODUCER_WARPS)
    stage = turn % STAGES
    mbarrier.wait(emptied.index(stage), ((turn // STAGES) & 1) ^ 1)
    even, odd = _unpack_fp8(words_0, scales_0, EACH, HALF)
    _put(evens, odds, stage, 0, even, odd)
    even, odd = _unpack_fp8(words_1, scales_1, EACH, HALF)
    _put(evens, odds, stage, EACH, even, odd)
    even, odd = _unpack_fp8(words_2, scales_2, EACH, HALF)
    _put(evens, odds, stage, 2 * EACH, even, odd)
    even, odd = _unpack_fp8(words_3, scales_3, EACH, HALF)
    _put(evens, odds, stage, 3 * EACH, even, odd)
    fence_async_shared()
    mbarrier.arrive(filled.index(stage), count=1)


@gluon.jit
def _produce_chosen(
    evens, odds, filled, emptied, entries, chosen_row, begin, entry_count, turn, rows_0, rows_1, rows_2, rows_3,
    KEYS: gl.constexpr, HALF: gl.constexpr,
):
    """Fill a tile with the chosen entries `rows`; returns the rows of the next tile, fetched meanwhile."""
    EACH: gl.constexpr = KEYS // 4
    count = entry_count - begin
    codes_0, scales_0 = _load_fp4(entries, rows_0, count, EACH, HALF, PRODUCER_WARPS)
    codes_1, scales_1 = _load_fp4(entries, rows_1, count - EACH, EACH, HALF, PRODUCER_WARPS)
    codes_2, scales_2 = _load_fp4(entries, rows_2, count - 2 * EACH, EACH, HALF, PRODUCER_WARPS)
    codes_3, scales_3 = _load_fp4(entries, rows_3, count - 3 * EACH, EACH, HALF, PRODUCER_WARPS)
    next_0, next_1, next_2, next_3 = _chosen_rows(chosen_row, begin + KEYS, entry_count, KEYS)
    stage = turn % STAGES
    mbarrier.wait(emptied.index(stage), ((turn // STAGES) & 1) ^ 1)
    even, odd = _unpack_fp4(codes_0, scales_0, EACH, HALF)
    _put(evens, odds, stage, 0, even, odd)
    even, odd = _unpack_fp4(codes_1, scales_1, EACH, HALF)
    _put(evens, odds, stage, EACH, even, odd)
    even, odd = _unpack_fp4(codes_2, scales_2, EACH, HALF)
    _put(evens, odds, stage, 2 * EACH, even, odd)
    even, odd = _unpack_fp4(codes_3, scales_3, EACH, HALF)
    _put(evens, odds, stage, 3 * EACH, even, odd)
    fence_async_shared()
    mbarrier.arrive(filled.index(stage), count=1)
    return next_0, next_1, next_2, next_3


@gluon.jit
def _chosen_rows(chosen_row, begin, entry_count, KEYS: gl.constexpr):
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    EACH: gl.constexpr = KEYS // 4
    place = begin + gl.arange(0, EACH, gl.SliceLayout(1, flat))
    return (
        gl.load(chosen_row + place, mask=place < entry_count, other=0),
        gl.load(chosen_row + place + EACH, mask=place + EACH < entry_count, other=0),
        gl.load(chosen_row + place + 2 * EACH, mask=place + 2 * EACH < entry_count, other=0),
        gl.load(chosen_row + place + 3 * EACH, mask=place + 3 * EACH < entry_count, other=0),
    )


@gluon.jit
def _produce(
    evens, odds, filled, emptied, window, entries, chosen_row, base, ring, first, position, entry_count, window_tiles,
    tile_start, tile_end, KEYS: gl.constexpr, HALF: gl.constexpr,
):
    for tile in range(tile_start, gl.minimum(tile_end, window_tiles)):
        at = first + tile * KEYS
        _produce_window(
            evens, odds, filled, emptied, window, base, ring, at, position + 1 - at, tile - tile_start, KEYS, HALF)
    start = gl.maximum(tile_start, window_tiles)
    rows_0, rows_1, rows_2, rows_3 = _chosen_rows(chosen_row, (start - window_tiles) * KEYS, entry_count, KEYS)
    for tile in range(start, tile_end):
        rows_0, rows_1, rows_2, rows_3 = _produce_chosen(
            evens, odds, filled, emptied, entries, chosen_row, (tile - window_tiles) * KEYS, entry_count,
            tile - tile_start, rows_0, rows_1, rows_2, rows_3, KEYS, HALF)


@gluon.jit
def _consume(
    query_even, query_odd, evens, odds, filled, emptied, sink, cos, sin, out, part_out, part_stats, logit_scale,
    row, part, first, position, entry_count, window_tiles, tile_start, tile_end,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, PARTS: gl.constexpr,
):
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, score)
    head = gl.arange(0, HEADS, by_head)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, score))
    if PARTS == 1:
        sink_logit = gl.load(sink + head) * LOG2_E
        highest = gl.maximum(sink_logit, LOWEST)
        total = gl.exp2(sink_logit - highest)
    else:
        highest = gl.full((HEADS,), LOWEST, gl.float32, by_head)
        total = gl.zeros((HEADS,), gl.float32, by_head)
    out_even = gl.zeros((HEADS, HALF), gl.float32, wide)
    out_odd = gl.zeros((HEADS, HALF), gl.float32, wide)
    for tile in range(tile_start, tile_end):
        turn = tile - tile_start
        stage = turn % STAGES
        even = evens.index(stage)
        odd = odds.index(stage)
        in_window = position + 1 - first - tile * KEYS
        count = gl.where(tile < window_tiles, in_window, entry_count - (tile - window_tiles) * KEYS)
        mbarrier.wait(filled.index(stage), (turn // STAGES) & 1)
        logits = gl.zeros((HEADS, KEYS), gl.float32, score)
        logits = warpgroup_mma(query_even, even.permute((1, 0)), logits, use_acc=False, is_async=True)
        logits = warpgroup_mma(query_odd, odd.permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where((key < count)[None, :], logits * logit_scale, float("-inf"))
        higher = gl.maximum(highest, gl.max(logits, 1))
        weights = gl.exp2(logits - higher[:, None])
        keep = gl.exp2(highest - higher)
        total = total * keep + gl.sum(weights, 1)
        highest = higher
        spread = gl.convert_layout(keep, gl.SliceLayout(1, wide))[:, None]
        rounded = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
        out_even = warpgroup_mma(rounded, even, out_even * spread, is_async=True)
        out_odd = warpgroup_mma(rounded, odd, out_odd * spread, is_async=True)
        out_even, out_odd = warpgroup_mma_wait(0, deps=[out_even, out_odd])
        mbarrier.arrive(emptied.index(stage), count=1)

    columns = gl.arange(0, HALF, gl.SliceLayout(0, wide))
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, wide))
    if PARTS == 1:
        # Without keys and without a sink the sum is 0, and so is the output.
        scale = 2.0 ** SHIFT / gl.where(total > 0, total, 1.0)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, wide))[:, None]
        pair = columns - (HALF - PAIRS)
        c = gl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
        s = gl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
        out_even = out_even * scale
        out_odd = out_odd * scale
        low = (out_even * c + out_odd * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
        high = (out_odd * c - out_even * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
        target = (row.to(gl.int64) * HEADS + heads)[:, None] * HALF + columns[None, :]
        gl.store(out.to(gl.pointer_type(gl.uint32), bitcast=True) + target, low | (high << 16))
    else:
        at = row.to(gl.int64) * PARTS + part
        gl.store(part_stats + 2 * (at * HEADS + head), highest)
        gl.store(part_stats + 2 * (at * HEADS + head) + 1, total)
        target = (at * HEADS + heads)[:, None] * (2 * HALF) + columns[None, :]
        gl.store(part_out + target, out_even)
        gl.store(part_out + target + HALF, out_odd)


@gluon.jit
def sparse_attention_kernel(
    queries, window, bases, positions, lowest, entries, chosen, sink, cos, sin, out, part_out, part_stats,
    logit_scale, ring, window_rows, chosen_stride,
    HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, KEYS: gl.constexpr, CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    row = gl.program_id(0)
    part = gl.program_id(1)
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    query_at = (row.to(gl.int64) * HEADS + head)[:, None] * HALF + columns[None, :]
    pairs = gl.load(queries.to(gl.pointer_type(gl.uint32), bitcast=True) + query_at)
    query_even = gl.allocate_shared_memory(
        gl.bfloat16, [HEADS, HALF], operand, (pairs & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True))
    query_odd = gl.allocate_shared_memory(
        gl.bfloat16, [HEADS, HALF], operand, (pairs >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True))
    evens = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALF], operand)
    odds = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALF], operand)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=1)
    fence_async_shared()

    position = gl.load(positions + row)
    first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
    window_tiles = gl.cdiv(position + 1 - first, KEYS)
    chosen_row = chosen + row.to(gl.int64) * chosen_stride
    entry_count = row * 0
    if CHOSEN > 0:
        every = gl.load(chosen_row + gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [8], [0])))
        entry_count = gl.sum((every >= 0).to(gl.int32), 0)
    tiles = window_tiles + gl.cdiv(entry_count, KEYS)
    tile_start = part * tiles // PARTS
    tile_end = (part + 1) * tiles // PARTS
    base = gl.load(bases + row)
    gl.warp_specialize(
        [
            (_consume, (query_even, query_odd, evens, odds, filled, emptied, sink, cos, sin, out, part_out, part_stats,
                        logit_scale, row, part, first, position, entry_count, window_tiles, tile_start, tile_end,
                        HEADS, KEYS, HALF, PAIRS, PARTS)),
            (_produce, (evens, odds, filled, emptied, window, entries, chosen_row, base, ring, first, position,
                        entry_count, window_tiles, tile_start, tile_end, KEYS, HALF)),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


def sparse_attention(
    queries: Tensor, window: Tensor, bases: Tensor, positions: Tensor, lowest: Tensor, sink: Tensor, cos: Tensor,
    sin: Tensor, *, ring: int, window_rows: int, scale: float, entries: Tensor | None, chosen: Tensor | None,
    batch_invariant: bool = False, parts: int | None = None,
) -> Tensor:
    """As `whalepod.kernels.sparse_attention`, for bfloat16 on Hopper, 64 heads of 512 channels."""
    queries = queries.contiguous()
    rows, heads, width = queries.shape
    out = torch.empty_like(queries)
    if rows == 0:
        return out
    parts = parts or parts_of(rows, batch_invariant=batch_invariant)
    part_out, part_stats = scratch(queries, heads, parts)
    sparse_attention_kernel[(rows, parts)](
        queries, window, bases, positions, lowest, window if entries is None else entries,
        bases if chosen is None else chosen, sink, cos, sin, out, part_out, part_stats,
        scale * 2.0**SHIFT.value * LOG2_E.value, ring, window_rows, 0 if chosen is None else chosen.stride(0),
        HEADS=heads, HALF=width // 2, PAIRS=cos.shape[1], KEYS=64, CHOSEN=0 if chosen is None else chosen.shape[1],
        PARTS=parts, num_warps=8,
    )
    if parts > 1:
        combine_parts(part_out, part_stats, sink, cos, sin, out, parts=parts, heads=heads, fast=True)
    return out
