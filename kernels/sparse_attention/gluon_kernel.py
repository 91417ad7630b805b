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
PRODUCER_WARPS = gl.constexpr(8)
CONSUMER_REGISTERS = gl.constexpr(192)


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
        mask=(keys < count)[:, None],
        other=0,
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
        UNPACK_FP8_ASM, "=r,=r,r,r", [words, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


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
        mask=(keys < count)[:, None],
        other=0,
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
        UNPACK_FP4_ASM, "=r,=r,=r,=r,r,r,r", [codes, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
    )


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
        window, base + (at + 2 * EACH + key) % ring, count - 2 * EACH, EACH, HALF, PRODUCER_WARPS
    )
    words_3, scales_3 = _load_fp8(
        window, base + (at + 3 * EACH + key) % ring, count - 3 * EACH, EACH, HALF, PRODUCER_WARPS
    )
    stage = turn % 2
    mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
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
    evens,
    odds,
    filled,
    emptied,
    entries,
    chosen_row,
    begin,
    entry_count,
    turn,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    KEYS: gl.constexpr,
    HALF: gl.constexpr,
):
    """Fill a tile with the chosen entries `rows`; returns the rows of the next tile, fetched meanwhile."""
    EACH: gl.constexpr = KEYS // 4
    count = entry_count - begin
    codes_0, scales_0 = _load_fp4(entries, rows_0, count, EACH, HALF, PRODUCER_WARPS)
    codes_1, scales_1 = _load_fp4(entries, rows_1, count - EACH, EACH, HALF, PRODUCER_WARPS)
    codes_2, scales_2 = _load_fp4(entries, rows_2, count - 2 * EACH, EACH, HALF, PRODUCER_WARPS)
    codes_3, scales_3 = _load_fp4(entries, rows_3, count - 3 * EACH, EACH, HALF, PRODUCER_WARPS)
    next_0, next_1, next_2, next_3 = _chosen_rows(chosen_row, begin + KEYS, entry_count, KEYS)
    stage = turn % 2
    mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
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
    evens, odds, filled, emptied, window, entries, chosen_row, base, ring, first, position, part,
    KEYS: gl.constexpr, HALF: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr,
):
    window_tiles, entry_count, pair_start, pair_end = _extent(chosen_row, first, position, part, KEYS, CHOSEN, PARTS)
    if CHOSEN > 0:
        _prefetch_chosen(entries, chosen_row, 2 * pair_start - window_tiles, 2 * pair_end - window_tiles, KEYS, HALF, CHOSEN)
    window_end = 2 * pair_end
    if CHOSEN > 0:
        window_end = gl.minimum(window_end, window_tiles)
    for tile in range(2 * pair_start, window_end):
        at = first + tile * KEYS
        _produce_window(
            evens, odds, filled, emptied, window, base, ring, at, position + 1 - at, tile - 2 * pair_start, KEYS, HALF)
    if CHOSEN > 0:
        start = gl.maximum(2 * pair_start, window_tiles)
        rows_0, rows_1, rows_2, rows_3 = _chosen_rows(chosen_row, (start - window_tiles) * KEYS, entry_count, KEYS)
        for tile in range(start, 2 * pair_end):
            rows_0, rows_1, rows_2, rows_3 = _produce_chosen(
                evens, odds, filled, emptied, entries, chosen_row, (tile - window_tiles) * KEYS, entry_count,
                tile - 2 * pair_start, rows_0, rows_1, rows_2, rows_3, KEYS, HALF)


@gluon.jit
def _prefetch_chosen(
    entries, chosen_row, tile_start, tile_end, KEYS: gl.constexpr, HALF: gl.constexpr, CHOSEN: gl.constexpr
):
    """Ask for the records of all chosen entries of the tiles, so that fetching them later finds them in the L2 cache."""
    place = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
    rows = gl.load(chosen_row + place)
    wanted = (rows >= 0) & (place >= tile_start * KEYS) & (place < tile_end * KEYS)
    start = gl.maximum(rows, 0).to(gl.int64) * (HALF + HALF // 8)
    for line in gl.static_range((HALF + HALF // 8 + 127) // 128):
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
            [entries + start + 128 * line, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _extent(chosen_row, first, position, part, KEYS: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr):
    """Tiles of the window, number of chosen entries, and the pairs of tiles that this part of the row's keys is."""
    window_tiles = gl.cdiv(position + 1 - first, KEYS)
    entry_count = position * 0
    if CHOSEN > 0:
        places = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        entry_count = gl.sum((gl.load(chosen_row + places) >= 0).to(gl.int32), 0)
    pairs = gl.cdiv(window_tiles + gl.cdiv(entry_count, KEYS), 2)
    return window_tiles, entry_count, part * pairs // PARTS, (part + 1) * pairs // PARTS


@gluon.jit
def _fetch_queries(queries, row, query, ready, HEADS: gl.constexpr, HALF: gl.constexpr, ME: gl.constexpr):
    """Each of the two groups of warps brings half of the heads."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    MINE: gl.constexpr = HEADS // 2
    head = ME * MINE + gl.arange(0, MINE, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    at = (row.to(gl.int64) * HEADS + head)[:, None] * HALF + columns[None, :]
    pairs = gl.load(queries.to(gl.pointer_type(gl.uint32), bitcast=True) + at)
    query.index(0).slice(ME * MINE, MINE, 0).store((pairs & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True))
    query.index(1).slice(ME * MINE, MINE, 0).store((pairs >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True))
    fence_async_shared()
    mbarrier.arrive(ready, count=1)
    mbarrier.wait(ready, 0)


@gluon.jit
def _scores(query, even, odd, count, unknown_0, logit_scale, HEADS: gl.constexpr, KEYS: gl.constexpr):
    """Scaled scores [HEADS, KEYS] of a tile, -inf from key `count` on."""
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    logits = gl.zeros((HEADS, KEYS), gl.float32, score)
    logits = warpgroup_mma(query.index(unknown_0), even.permute((1, 0)), logits, use_acc=False, is_async=True)
    logits = warpgroup_mma(query.index(unknown_0 + 1), odd.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    key = gl.arange(0, KEYS, gl.SliceLayout(0, score))
    return gl.where((key < count)[None, :], logits * logit_scale, float("-inf"))


@gluon.jit
def _rescaled(out, before, after, HALF: gl.constexpr):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    return out * gl.convert_layout(gl.exp2(before - after), gl.SliceLayout(1, wide))[:, None]


@gluon.jit
def _consume(
    queries, query, evens, odds, weights, maxima, sums, ready, filled, emptied, scored, read, summed,
    sink, cos, sin, out, part_out, part_stats, logit_scale, chosen_row, row, part, first, position,
    HEADS: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, CHOSEN: gl.constexpr,
    PARTS: gl.constexpr, ME: gl.constexpr,
):
    """Group ME of warps scores every other tile, and sums its half of the channels (even or odd) over all of them.

    Weights of a tile go to the other group through shared memory, with the highest score so far: tile after tile, the
    two groups raise it in turn, so both know it for every tile and scale their sums alike.
    """
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 2, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, score)
    OTHER: gl.constexpr = 1 - ME
    _fetch_queries(queries, row, query, ready, HEADS, HALF, ME)
    window_tiles, entry_count, pair_start, pair_end = _extent(chosen_row, first, position, part, KEYS, CHOSEN, PARTS)
    head = gl.arange(0, HEADS, by_head)
    highest = gl.full((HEADS,), LOWEST, gl.float32, by_head)
    total = gl.zeros((HEADS,), gl.float32, by_head)
    if PARTS == 1:
        sink_logit = gl.load(sink + head) * LOG2_E
        highest = gl.maximum(sink_logit, LOWEST)
        if ME == 0:
            total = gl.exp2(sink_logit - highest)
    half = gl.zeros((HEADS, HALF), gl.float32, wide)
    if ME == 0:
        mine = evens
    else:
        mine = odds
    for pair in range(pair_start, pair_end):
        phase = (pair - pair_start) & 1
        tile = 2 * pair + ME
        in_window = position + 1 - first - tile * KEYS
        count = gl.where(tile < window_tiles, in_window, entry_count - (tile - window_tiles) * KEYS)
        mbarrier.wait(filled.index(ME), phase)
        # Known places would be hoisted as hundreds of registers of operand descriptors.
        unknown_0 = gl.inline_asm_elementwise(
            "shr.u32 $0, $1, 31;", "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1)
        own = ME + unknown_0
        theirs = OTHER + unknown_0
        logits = _scores(query, evens.index(own), odds.index(own), count, unknown_0, logit_scale, HEADS, KEYS)
        before = highest
        if ME == 1:
            mbarrier.wait(scored.index(OTHER), phase)
            before = maxima.index(OTHER).load(by_head)
        after = gl.maximum(before, gl.max(logits, 1))
        weight = gl.exp2(logits - after[:, None])
        total = total * gl.exp2(highest - after) + gl.sum(weight, 1)
        rounded = weight.to(gl.bfloat16)
        mbarrier.wait(read.index(ME), phase ^ 1)
        maxima.index(ME).store(after)
        weights.index(ME).store(rounded)
        fence_async_shared()
        mbarrier.arrive(scored.index(ME), count=1)
        operand = gl.convert_layout(rounded, gl.DotOperandLayout(0, wide, 2))
        if ME == 0:
            half = _rescaled(half, highest, after, HALF)
            half = warpgroup_mma(operand, mine.index(own), half, is_async=True)
            half = warpgroup_mma_wait(0, deps=[half])
            mbarrier.arrive(emptied.index(ME), count=1)
            mbarrier.wait(scored.index(OTHER), phase)
            highest = maxima.index(OTHER).load(by_head)
            total = total * gl.exp2(after - highest)
            half = _rescaled(half, after, highest, HALF)
            half = warpgroup_mma(weights.index(theirs), mine.index(theirs), half, is_async=True)
            half = warpgroup_mma_wait(0, deps=[half])
            mbarrier.arrive(emptied.index(OTHER), count=1)
            mbarrier.arrive(read.index(OTHER), count=1)
        else:
            half = _rescaled(half, highest, before, HALF)
            half = warpgroup_mma(weights.index(theirs), mine.index(theirs), half, is_async=True)
            half = warpgroup_mma_wait(0, deps=[half])
            mbarrier.arrive(emptied.index(OTHER), count=1)
            mbarrier.arrive(read.index(OTHER), count=1)
            half = _rescaled(half, before, after, HALF)
            half = warpgroup_mma(operand, mine.index(own), half, is_async=True)
            half = warpgroup_mma_wait(0, deps=[half])
            mbarrier.arrive(emptied.index(ME), count=1)
            highest = after

    sums.index(ME).store(total)
    if PARTS == 1:
        # Every tile has been read: the ring holds the results, so that a thread gets both channels of a pair.
        mine._reinterpret(gl.float32, [HEADS, HALF], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])).store(half)
        mbarrier.arrive(summed, count=1)
        mbarrier.wait(summed, 0)
        _write_turned(evens, odds, sums, cos, sin, out, row, HEADS, HALF, PAIRS, ME)
    else:
        mbarrier.arrive(summed, count=1)
        mbarrier.wait(summed, 0)
        at = row.to(gl.int64) * PARTS + part
        if ME == 0:
            gl.store(part_stats + 2 * (at * HEADS + head), highest)
            gl.store(part_stats + 2 * (at * HEADS + head) + 1, total + sums.index(OTHER).load(by_head))
        heads = gl.arange(0, HEADS, gl.SliceLayout(1, wide))
        columns = gl.arange(0, HALF, gl.SliceLayout(0, wide))
        gl.store(part_out + (at * HEADS + heads)[:, None] * (2 * HALF) + ME * HALF + columns[None, :], half)


@gluon.jit
def _write_turned(
    evens, odds, sums, cos, sin, out, row, HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr,
    ME: gl.constexpr,
):
    """Divide half of the heads by their sums, turn the last 2 · PAIRS channels back and store."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    held: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    by_head: gl.constexpr = gl.SliceLayout(1, flat)
    MINE: gl.constexpr = HEADS // 2
    total = sums.index(0).slice(ME * MINE, MINE, 0).load(by_head) + sums.index(1).slice(ME * MINE, MINE, 0).load(by_head)
    # Without keys and without a sink the sum is 0, and so is the output.
    scale = (2.0 ** SHIFT / gl.where(total > 0, total, 1.0))[:, None]
    even = evens._reinterpret(gl.float32, [HEADS, HALF], held).slice(ME * MINE, MINE, 0).load(flat) * scale
    odd = odds._reinterpret(gl.float32, [HEADS, HALF], held).slice(ME * MINE, MINE, 0).load(flat) * scale
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    pair = columns - (HALF - PAIRS)
    c = gl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = gl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    low = (even * c + odd * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    high = (odd * c - even * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    head = ME * MINE + gl.arange(0, MINE, by_head)
    target = (row.to(gl.int64) * HEADS + head)[:, None] * HALF + columns[None, :]
    gl.store(out.to(gl.pointer_type(gl.uint32), bitcast=True) + target, low | (high << 16))


@gluon.jit
def sparse_attention_kernel(
    queries, window, bases, positions, lowest, entries, chosen, sink, cos, sin, out, part_out, part_stats,
    logit_scale, ring, window_rows, chosen_stride,
    HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, KEYS: gl.constexpr, CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    row = gl.program_id(0)
    part = gl.program_id(1)
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], operand)
    evens = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], operand)
    odds = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], operand)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], operand)
    maxima = gl.allocate_shared_memory(gl.float32, [2, HEADS], vector)
    sums = gl.allocate_shared_memory(gl.float32, [2, HEADS], vector)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=2)
    mbarrier.init(summed, count=2)
    for stage in gl.static_range(2):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=2)
        mbarrier.init(scored.index(stage), count=1)
        mbarrier.init(read.index(stage), count=1)
    fence_async_shared()

    position = gl.load(positions + row)
    first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
    base = gl.load(bases + row)
    chosen_row = chosen + row.to(gl.int64) * chosen_stride
    gl.warp_specialize(
        [
            (_produce, (evens, odds, filled, emptied, window, entries, chosen_row, base, ring, first, position, part,
                        KEYS, HALF, CHOSEN, PARTS)),
            (_consume, (queries, query, evens, odds, weights, maxima, sums, ready, filled, emptied,
                        scored, read, summed, sink, cos, sin, out, part_out, part_stats, logit_scale, chosen_row, row,
                        part, first, position, HEADS, KEYS, HALF, PAIRS, CHOSEN, PARTS, gl.constexpr(0))),
            (_consume, (queries, query, evens, odds, weights, maxima, sums, ready, filled, emptied,
                        scored, read, summed, sink, cos, sin, out, part_out, part_stats, logit_scale, chosen_row, row,
                        part, first, position, HEADS, KEYS, HALF, PAIRS, CHOSEN, PARTS, gl.constexpr(1))),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    bases: Tensor,
    positions: Tensor,
    lowest: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: int,
    window_rows: int,
    scale: float,
    entries: Tensor | None,
    chosen: Tensor | None,
    batch_invariant: bool = False,
    parts: int | None = None,
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
        queries,
        window,
        bases,
        positions,
        lowest,
        window if entries is None else entries,
        bases if chosen is None else chosen,
        sink,
        cos,
        sin,
        out,
        part_out,
        part_stats,
        scale * 2.0**SHIFT.value * LOG2_E.value,
        ring,
        window_rows,
        0 if chosen is None else chosen.stride(0),
        HEADS=heads,
        HALF=width // 2,
        PAIRS=cos.shape[1],
        KEYS=64,
        CHOSEN=0 if chosen is None else chosen.shape[1],
        PARTS=parts,
        num_warps=PRODUCER_WARPS.value,
    )
    if parts > 1:
        combine_parts(part_out, part_stats, sink, cos, sin, out, parts=parts, heads=heads, fast=True)
    return out
