"""Attention over packed rows for Hopper, with the work of its warps spelled out.

A program takes query rows (or parts of their keys) one after the other. Eight warps fetch packed records, turn them
into bfloat16 and put tiles of 64 keys into a ring of two; two groups of four warps, A and B, multiply:

    producer   fill tile 0 ─ fill tile 1 ─ fill tile 2 ─ …
    A          scores of tile 0 ─ softmax ─ sums over tile 0 ─ sums over tile 1 ─ scores of tile 2 ─ …
    B            scores of tile 1 ─ sums over tile 0 ─ softmax ─ sums over tile 1 ─ scores of tile 3 ─ …

Each group scores every other tile for all channels, and sums half of the channels over all tiles. Even and odd channels
lie in two tiles of half the width, as in `triton_kernel.py`, whose arguments and results these kernels share.
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
"""A thread of the multiplying groups; the producer's are left 64."""
KEYS = gl.constexpr(64)
"""Keys of a tile."""


# -------------------------------------------------------------------------------------------------------- the producer


@gluon.jit
def _load_fp8(records, rows, count, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Raw pairs of codes [ROWS, HALF] int16 and scale bytes [ROWS, HALF // 16] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [PRODUCER_WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = 2 * HALF + HALF // 16
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    words = gl.load(
        (records + gl.multiple_of(start, 16)[:, None]).to(gl.pointer_type(gl.int16), bitcast=True) + columns[None, :],
        mask=(keys < count)[:, None],
        other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 16, gl.SliceLayout(0, groups))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (2 * HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return words, scales


@gluon.jit
def _unpack_fp8(words, scale_bytes):
    ROWS: gl.constexpr = words.shape[0]
    HALF: gl.constexpr = words.shape[1]
    exponents = gl.minimum(scale_bytes.to(gl.int32) + (FP8_EXPONENT - SHIFT), 254)
    scales = (exponents << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    spread = gl.expand_dims(scales, 2).broadcast_to((ROWS, HALF // 16, 16)).reshape((ROWS, HALF))
    spread = gl.convert_layout(spread, words.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        UNPACK_FP8_ASM, "=r,=r,r,r", [words, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def _load_fp4(records, rows, count, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Raw codes, two a byte [ROWS, HALF], and scale bytes [ROWS, HALF // 8] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [PRODUCER_WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = HALF + HALF // 8
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    codes = gl.load(
        records.to(gl.pointer_type(gl.int8), bitcast=True) + gl.multiple_of(start, 16)[:, None] + columns[None, :],
        mask=(keys < count)[:, None],
        other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 8, gl.SliceLayout(0, groups))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return codes, scales


@gluon.jit
def _unpack_fp4(codes, scale_bytes):
    ROWS: gl.constexpr = codes.shape[0]
    HALF: gl.constexpr = codes.shape[1]
    scales = scale_bytes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * 2.0 ** (FP4_EXPONENT - SHIFT)
    scales = scales.to(gl.bfloat16)
    spread = gl.expand_dims(scales, 2).broadcast_to((ROWS, HALF // 8, 8)).reshape((ROWS, HALF))
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
def _produce_window(evens, odds, filled, emptied, window, base, ring, at, count, turn, HALF: gl.constexpr):
    """Fill a tile with the window rows of positions at, at + 1, …, half of them at a time for want of registers."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    EACH: gl.constexpr = KEYS // 2
    key = gl.arange(0, EACH, gl.SliceLayout(1, flat))
    words, scales = _load_fp8(window, base + (at + key) % ring, count, EACH, HALF)
    stage = turn % 2
    mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
    even, odd = _unpack_fp8(words, scales)
    words, scales = _load_fp8(window, base + (at + EACH + key) % ring, count - EACH, EACH, HALF)
    _put(evens, odds, stage, 0, even, odd)
    even, odd = _unpack_fp8(words, scales)
    _put(evens, odds, stage, EACH, even, odd)
    fence_async_shared()
    mbarrier.arrive(filled.index(stage), count=1)


@gluon.jit
def _chosen_rows(chosen_row, begin, entry_count, ROWS: gl.constexpr):
    """Places in the pool of chosen entries begin, begin + 1, …; 0 beyond the last."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    place = begin + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    return gl.load(chosen_row + place, mask=place < entry_count, other=0)


@gluon.jit
def _produce_chosen(
    evens, odds, filled, emptied, entries, chosen_row, entry_count, tile_start, tile_end, turn, HALF: gl.constexpr
):
    """Fill tiles with chosen entries. The places of the next tile's are on their way while one is unpacked."""
    EACH: gl.constexpr = KEYS // 2
    rows_0 = _chosen_rows(chosen_row, tile_start * KEYS, entry_count, EACH)
    rows_1 = _chosen_rows(chosen_row, tile_start * KEYS + EACH, entry_count, EACH)
    for tile in range(tile_start, tile_end):
        count = entry_count - tile * KEYS
        codes_0, scales_0 = _load_fp4(entries, rows_0, count, EACH, HALF)
        codes_1, scales_1 = _load_fp4(entries, rows_1, count - EACH, EACH, HALF)
        rows_0 = _chosen_rows(chosen_row, (tile + 1) * KEYS, entry_count, EACH)
        rows_1 = _chosen_rows(chosen_row, (tile + 1) * KEYS + EACH, entry_count, EACH)
        stage = turn % 2
        mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
        even, odd = _unpack_fp4(codes_0, scales_0)
        _put(evens, odds, stage, 0, even, odd)
        even, odd = _unpack_fp4(codes_1, scales_1)
        _put(evens, odds, stage, EACH, even, odd)
        fence_async_shared()
        mbarrier.arrive(filled.index(stage), count=1)
        turn += 1
    return turn


@gluon.jit
def _prefetch(pointers, wanted):
    """Ask for the cache lines of `pointers` where `wanted`, so that fetching them later finds them in the L2 cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch_item(
    queries,
    entries,
    chosen,
    chosen_stride,
    item,
    items,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Queries and all chosen records of an item's row."""
    row = item // PARTS
    QUERY_LINES: gl.constexpr = HEADS * HALF * 4 // 128
    line = gl.arange(0, QUERY_LINES, gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
    _prefetch(queries + row.to(gl.int64) * (2 * HEADS * HALF) + 64 * line, (line >= 0) & (item < items))
    if CHOSEN > 0:
        place = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
        rows = gl.load(chosen + row.to(gl.int64) * chosen_stride + place, mask=(place >= 0) & (item < items), other=-1)
        start = gl.maximum(rows, 0).to(gl.int64) * (HALF + HALF // 8)
        for part in gl.static_range((HALF + HALF // 8 + 127) // 128):
            _prefetch(entries + start + 128 * part, rows >= 0)


@gluon.jit
def _produce(
    queries,
    window,
    bases,
    positions,
    lowest,
    entries,
    chosen,
    evens,
    odds,
    filled,
    emptied,
    ring,
    window_rows,
    chosen_stride,
    items,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    turn = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = item // PARTS
        chosen_row = chosen + row.to(gl.int64) * chosen_stride
        position = gl.load(positions + row)
        first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
        base = gl.load(bases + row)
        if item < gl.num_programs(0):
            _prefetch_item(queries, entries, chosen, chosen_stride, item, items, HEADS, HALF, CHOSEN, PARTS)
        window_tiles, entry_count, pair_start, pair_end = _extent(
            chosen_row, first, position, item % PARTS, CHOSEN, PARTS
        )
        window_end = 2 * pair_end
        if CHOSEN > 0:
            window_end = gl.minimum(window_end, window_tiles)
        for tile in range(2 * pair_start, window_end):
            at = first + tile * KEYS
            _produce_window(evens, odds, filled, emptied, window, base, ring, at, position + 1 - at, turn, HALF)
            turn += 1
        _prefetch_item(
            queries, entries, chosen, chosen_stride, item + gl.num_programs(0), items, HEADS, HALF, CHOSEN, PARTS
        )
        if CHOSEN > 0:
            start = gl.maximum(2 * pair_start, window_tiles)
            turn = _produce_chosen(
                evens,
                odds,
                filled,
                emptied,
                entries,
                chosen_row,
                entry_count,
                start - window_tiles,
                2 * pair_end - window_tiles,
                turn,
                HALF,
            )


@gluon.jit
def _extent(chosen_row, first, position, part, CHOSEN: gl.constexpr, PARTS: gl.constexpr):
    """Tiles of the window, number of chosen entries, and the pairs of tiles that this part of the row's keys is."""
    window_tiles = gl.cdiv(position + 1 - first, KEYS)
    entry_count = position * 0
    if CHOSEN > 0:
        places = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        entry_count = gl.sum((gl.load(chosen_row + places) >= 0).to(gl.int32), 0)
    pairs = gl.cdiv(window_tiles + gl.cdiv(entry_count, KEYS), 2)
    return window_tiles, entry_count, part * pairs // PARTS, (part + 1) * pairs // PARTS


# ----------------------------------------------------------------------------------------------- the multiplying groups


@gluon.jit
def _scores(query, even, odd, count, unknown_0, logit_scale, HEADS: gl.constexpr):
    """Scaled scores [HEADS, KEYS] of a tile, -inf from key `count` on."""
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    logits = gl.zeros((HEADS, KEYS), gl.float32, score)
    logits = warpgroup_mma(query.index(unknown_0), even.permute((1, 0)), logits, use_acc=False, is_async=True)
    logits = warpgroup_mma(query.index(unknown_0 + 1), odd.permute((1, 0)), logits, is_async=True)
    logits = warpgroup_mma_wait(0, deps=[logits])
    key = gl.arange(0, KEYS, gl.SliceLayout(0, score))
    return gl.where((key < count)[None, :], logits * logit_scale, float("-inf"))


@gluon.jit
def _add_tile(out_even, out_odd, weights, even, odd, before, after, QUARTER: gl.constexpr, ME: gl.constexpr):
    """Sums [HEADS, QUARTER] of this group's even and odd channels, from scale `before` to `after`, plus a tile's."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    keep = gl.convert_layout(gl.exp2(before - after), gl.SliceLayout(1, wide))[:, None]
    out_even = warpgroup_mma(weights, even.slice(ME * QUARTER, QUARTER, 1), out_even * keep, is_async=True)
    out_odd = warpgroup_mma(weights, odd.slice(ME * QUARTER, QUARTER, 1), out_odd * keep, is_async=True)
    return warpgroup_mma_wait(0, deps=[out_even, out_odd])


@gluon.jit
def _consume(
    queries,
    positions,
    lowest,
    chosen,
    sink,
    cos,
    sin,
    out,
    part_out,
    part_stats,
    query,
    evens,
    odds,
    weights,
    maxima,
    ready,
    summed,
    filled,
    emptied,
    scored,
    read,
    logit_scale,
    window_rows,
    chosen_stride,
    items,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PAIRS: gl.constexpr,
    CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
    ME: gl.constexpr,
):
    """Group ME: scores tiles 2i + ME and sums its half of the channels over all tiles.

    Weights of a tile go to the other group through shared memory, with the highest score so far: tile after tile, the
    two groups raise it in turn, so both know it for every tile and scale their sums alike.
    """
    QUARTER: gl.constexpr = HALF // 2
    OTHER: gl.constexpr = 1 - ME
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    by_head: gl.constexpr = gl.SliceLayout(1, score)
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, HEADS, by_head)
    turn = gl.program_id(0) * 0
    done = turn
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = item // PARTS
        # Each group brings the queries of half of the heads.
        mine = ME * (HEADS // 2) + gl.arange(0, HEADS // 2, gl.SliceLayout(1, flat))
        words = (row.to(gl.int64) * HEADS + mine)[:, None] * HALF + gl.arange(0, HALF, gl.SliceLayout(0, flat))[None, :]
        words = gl.load(queries.to(gl.pointer_type(gl.uint32), bitcast=True) + words)
        position = gl.load(positions + row)
        first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
        window_tiles, entry_count, pair_start, pair_end = _extent(
            chosen + row.to(gl.int64) * chosen_stride, first, position, item % PARTS, CHOSEN, PARTS
        )
        query.index(0).slice(ME * (HEADS // 2), HEADS // 2, 0).store(
            (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
        )
        query.index(1).slice(ME * (HEADS // 2), HEADS // 2, 0).store(
            (words >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
        )
        fence_async_shared()
        mbarrier.arrive(ready, count=1)

        highest = gl.full((HEADS,), LOWEST, gl.float32, by_head)
        total = gl.zeros((HEADS,), gl.float32, by_head)
        if PARTS == 1:
            sink_logit = gl.load(sink + head) * LOG2_E
            highest = gl.maximum(sink_logit, LOWEST)
            if ME == 0:
                total = gl.exp2(sink_logit - highest)
        out_even = gl.zeros((HEADS, QUARTER), gl.float32, wide)
        out_odd = gl.zeros((HEADS, QUARTER), gl.float32, wide)
        mbarrier.wait(ready, done & 1)
        for pair in range(pair_start, pair_end):
            phase = turn & 1
            turn += 1
            tile = 2 * pair + ME
            in_window = position + 1 - first - tile * KEYS
            count = gl.where(tile < window_tiles, in_window, entry_count - (tile - window_tiles) * KEYS)
            # Known places would be hoisted as a hundred registers of operand descriptors.
            unknown_0 = gl.inline_asm_elementwise(
                "shr.u32 $0, $1, 31;", "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1
            )
            own = ME + unknown_0
            theirs = OTHER + unknown_0
            mbarrier.wait(filled.index(ME), phase)
            logits = _scores(query, evens.index(own), odds.index(own), count, unknown_0, logit_scale, HEADS)
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
                out_even, out_odd = _add_tile(
                    out_even, out_odd, operand, evens.index(own), odds.index(own), highest, after, QUARTER, ME
                )
                mbarrier.arrive(emptied.index(ME), count=1)
                mbarrier.wait(scored.index(OTHER), phase)
                highest = maxima.index(OTHER).load(by_head)
                total = total * gl.exp2(after - highest)
                out_even, out_odd = _add_tile(
                    out_even,
                    out_odd,
                    weights.index(theirs),
                    evens.index(theirs),
                    odds.index(theirs),
                    after,
                    highest,
                    QUARTER,
                    ME,
                )
                mbarrier.arrive(emptied.index(OTHER), count=1)
                mbarrier.arrive(read.index(OTHER), count=1)
            else:
                out_even, out_odd = _add_tile(
                    out_even,
                    out_odd,
                    weights.index(theirs),
                    evens.index(theirs),
                    odds.index(theirs),
                    highest,
                    before,
                    QUARTER,
                    ME,
                )
                mbarrier.arrive(emptied.index(OTHER), count=1)
                mbarrier.arrive(read.index(OTHER), count=1)
                out_even, out_odd = _add_tile(
                    out_even, out_odd, operand, evens.index(own), odds.index(own), before, after, QUARTER, ME
                )
                mbarrier.arrive(emptied.index(ME), count=1)
                highest = after

        # The sums take the place of the maxima, once the other group has read the last. Past the barrier both groups
        # are done with the queries, too.
        mbarrier.wait(read.index(ME), (turn & 1) ^ 1)
        maxima.index(ME).store(total)
        mbarrier.arrive(summed, count=1)
        mbarrier.wait(summed, done & 1)
        done += 1
        total += maxima.index(OTHER).load(by_head)
        if PARTS == 1:
            _write_turned(out, out_even, out_odd, total, cos, sin, row, HEADS, HALF, PAIRS, ME)
        else:
            if ME == 0:
                gl.store(part_stats + 2 * (item.to(gl.int64) * HEADS + head), highest)
                gl.store(part_stats + 2 * (item.to(gl.int64) * HEADS + head) + 1, total)
            heads = gl.arange(0, HEADS, gl.SliceLayout(1, wide))
            columns = ME * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, wide))
            target = (item.to(gl.int64) * HEADS + heads)[:, None] * (2 * HALF) + columns[None, :]
            gl.store(part_out + target, out_even)
            gl.store(part_out + target + HALF, out_odd)


@gluon.jit
def _write_turned(
    out, even, odd, total, cos, sin, row, HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, ME: gl.constexpr
):
    """Divide by the sums, turn the last 2 · PAIRS channels back and store this group's channels."""
    QUARTER: gl.constexpr = HALF // 2
    wide: gl.constexpr = even.type.layout
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, wide))
    columns = ME * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, wide))
    # Without keys and without a sink the sum is 0, and so is the output.
    scale = gl.convert_layout(2.0**SHIFT / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, wide))[:, None]
    even = even * scale
    odd = odd * scale
    pair = columns - (HALF - PAIRS)
    c = gl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = gl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    low = (even * c + odd * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    high = (odd * c - even * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    target = (row.to(gl.int64) * HEADS + heads)[:, None] * HALF + columns[None, :]
    gl.store(out.to(gl.pointer_type(gl.uint32), bitcast=True) + target, low | (high << 16))


# ----------------------------------------------------------------------------------------------------------- the kernel


@gluon.jit
def sparse_attention_kernel(
    queries,
    window,
    bases,
    positions,
    lowest,
    entries,
    chosen,
    sink,
    cos,
    sin,
    out,
    part_out,
    part_stats,
    logit_scale,
    ring,
    window_rows,
    chosen_stride,
    items,
    HEADS: gl.constexpr,
    HALF: gl.constexpr,
    PAIRS: gl.constexpr,
    CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], operand)
    evens = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], operand)
    odds = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, HALF], operand)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], operand)
    maxima = gl.allocate_shared_memory(gl.float32, [2, HEADS], vector)
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
    gl.warp_specialize(
        [
            (
                _produce,
                (
                    queries,
                    window,
                    bases,
                    positions,
                    lowest,
                    entries,
                    chosen,
                    evens,
                    odds,
                    filled,
                    emptied,
                    ring,
                    window_rows,
                    chosen_stride,
                    items,
                    HEADS,
                    HALF,
                    CHOSEN,
                    PARTS,
                ),
            ),
            (
                _consume,
                (
                    queries,
                    positions,
                    lowest,
                    chosen,
                    sink,
                    cos,
                    sin,
                    out,
                    part_out,
                    part_stats,
                    query,
                    evens,
                    odds,
                    weights,
                    maxima,
                    ready,
                    summed,
                    filled,
                    emptied,
                    scored,
                    read,
                    logit_scale,
                    window_rows,
                    chosen_stride,
                    items,
                    HEADS,
                    HALF,
                    PAIRS,
                    CHOSEN,
                    PARTS,
                    gl.constexpr(0),
                ),
            ),
            (
                _consume,
                (
                    queries,
                    positions,
                    lowest,
                    chosen,
                    sink,
                    cos,
                    sin,
                    out,
                    part_out,
                    part_stats,
                    query,
                    evens,
                    odds,
                    weights,
                    maxima,
                    ready,
                    summed,
                    filled,
                    emptied,
                    scored,
                    read,
                    logit_scale,
                    window_rows,
                    chosen_stride,
                    items,
                    HEADS,
                    HALF,
                    PAIRS,
                    CHOSEN,
                    PARTS,
                    gl.constexpr(1),
                ),
            ),
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
    processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
    sparse_attention_kernel[(min(rows * parts, processors),)](
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
        rows * parts,
        HEADS=heads,
        HALF=width // 2,
        PAIRS=cos.shape[1],
        CHOSEN=0 if chosen is None else chosen.shape[1],
        PARTS=parts,
        num_warps=PRODUCER_WARPS.value,
    )
    if parts > 1:
        combine_parts(part_out, part_stats, sink, cos, sin, out, parts=parts, heads=heads, fast=True)
    return out
