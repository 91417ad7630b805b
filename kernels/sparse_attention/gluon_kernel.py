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

from whalepod.kernels.launch_sizes import launch_sizes

from .gluon_producer_kernel import KEYS, PRODUCER_WARPS, extent, produce
from .triton_kernel import combine_parts, scratch
from .unpacking import SHIFT

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
CONSUMER_REGISTERS = gl.constexpr(192)
"""A thread of the multiplying groups; the producer's are left 64."""

# A tensor a line would hide what the code does with them.
# fmt: off


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
def _query_words(words, start, COLUMNS: gl.constexpr, HEADS: gl.constexpr, HALF: gl.constexpr):
    """Channel pairs start … start + COLUMNS - 1 of half of the heads [HEADS / 2, COLUMNS] uint32."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [4, 1], [1, 0])
    head = gl.arange(0, HEADS // 2, gl.SliceLayout(1, flat))
    column = start + gl.arange(0, COLUMNS, gl.SliceLayout(0, flat))
    return gl.load(words + head[:, None] * HALF + column[None, :])


@gluon.jit
def _even(words):
    return (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _odd(words):
    return (words >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _turned(words, cos, sin):
    """Even and odd channels of these pairs, turned."""
    c = cos[None, :]
    s = sin[None, :]
    even = _even(words).to(gl.float32)
    odd = _odd(words).to(gl.float32)
    return (even * c - odd * s).to(gl.bfloat16), (odd * c + even * s).to(gl.bfloat16)


@gluon.jit
def _consume(
    queries, positions, lowest, chosen, sink, cos, sin, out, part_out, part_stats, query, evens, odds, weights, maxima,
    ready, summed, filled, emptied, scored, read, logit_scale, window_rows, chosen_stride, items,
    HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr,
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
    head = gl.arange(0, HEADS, by_head)
    turn = gl.program_id(0) * 0
    done = turn
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = item // PARTS
        # Each group brings the queries of half of the heads, in three pieces: what turns is in the last.
        own_queries = queries.to(gl.pointer_type(gl.uint32), bitcast=True) + (
            row.to(gl.int64) * HEADS + ME * (HEADS // 2)) * HALF
        low_words = _query_words(own_queries, 0, HALF // 2, HEADS, HALF)
        middle_words = _query_words(own_queries, HALF // 2, HALF // 4, HEADS, HALF)
        high_words = _query_words(own_queries, 3 * HALF // 4, HALF // 4, HEADS, HALF)
        pair = gl.arange(0, HALF // 4, gl.SliceLayout(0, high_words.type.layout)) - (HALF // 4 - PAIRS)
        query_cos = gl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)
        query_sin = gl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)
        position = gl.load(positions + row)
        first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
        window_tiles, entry_count, pair_start, pair_end = extent(
            chosen + row.to(gl.int64) * chosen_stride, first, position, item % PARTS, CHOSEN, PARTS)
        own_even = query.index(0).slice(ME * (HEADS // 2), HEADS // 2, 0)
        own_odd = query.index(1).slice(ME * (HEADS // 2), HEADS // 2, 0)
        own_even.slice(0, HALF // 2, 1).store(_even(low_words))
        own_odd.slice(0, HALF // 2, 1).store(_odd(low_words))
        own_even.slice(HALF // 2, HALF // 4, 1).store(_even(middle_words))
        own_odd.slice(HALF // 2, HALF // 4, 1).store(_odd(middle_words))
        even, odd = _turned(high_words, query_cos, query_sin)
        own_even.slice(3 * HALF // 4, HALF // 4, 1).store(even)
        own_odd.slice(3 * HALF // 4, HALF // 4, 1).store(odd)
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
                "shr.u32 $0, $1, 31;", "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1)
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
                    out_even, out_odd, operand, evens.index(own), odds.index(own), highest, after, QUARTER, ME)
                mbarrier.arrive(emptied.index(ME), count=1)
                mbarrier.wait(scored.index(OTHER), phase)
                highest = maxima.index(OTHER).load(by_head)
                total = total * gl.exp2(after - highest)
                out_even, out_odd = _add_tile(
                    out_even, out_odd, weights.index(theirs), evens.index(theirs), odds.index(theirs), after, highest,
                    QUARTER, ME)
                mbarrier.arrive(emptied.index(OTHER), count=1)
                mbarrier.arrive(read.index(OTHER), count=1)
            else:
                out_even, out_odd = _add_tile(
                    out_even, out_odd, weights.index(theirs), evens.index(theirs), odds.index(theirs), highest, before,
                    QUARTER, ME)
                mbarrier.arrive(emptied.index(OTHER), count=1)
                mbarrier.arrive(read.index(OTHER), count=1)
                out_even, out_odd = _add_tile(
                    out_even, out_odd, operand, evens.index(own), odds.index(own), before, after, QUARTER, ME)
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
    scale = gl.convert_layout(2.0 ** SHIFT / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, wide))[:, None]
    even = even * scale
    odd = odd * scale
    pair = columns - (HALF - PAIRS)
    c = gl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = gl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    low = (even * c + odd * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    high = (odd * c - even * s).to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.uint32)
    target = (row.to(gl.int64) * HEADS + heads)[:, None] * HALF + columns[None, :]
    gl.store(out.to(gl.pointer_type(gl.uint32), bitcast=True) + target, low | (high << 16))


@gluon.jit(do_not_specialize=["items"])
def sparse_attention_kernel(
    queries, window, bases, positions, lowest, entries, chosen, sink, cos, sin, out, part_out, part_stats,
    logit_scale, ring, window_rows, chosen_stride, items,
    HEADS: gl.constexpr, HALF: gl.constexpr, PAIRS: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr,
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
            (produce, (queries, window, bases, positions, lowest, entries, chosen, evens, odds,
                        filled, emptied,
                        ring, window_rows, chosen_stride, items, HEADS, HALF, CHOSEN, PARTS)),
            (_consume, (queries, positions, lowest, chosen, sink, cos, sin, out, part_out, part_stats, query, evens,
                        odds, weights, maxima, ready, summed, filled, emptied, scored, read, logit_scale,
                        window_rows, chosen_stride, items, HEADS, HALF, PAIRS, CHOSEN, PARTS, gl.constexpr(0))),
            (_consume, (queries, positions, lowest, chosen, sink, cos, sin, out, part_out, part_stats, query, evens,
                        odds, weights, maxima, ready, summed, filled, emptied, scored, read, logit_scale,
                        window_rows, chosen_stride, items, HEADS, HALF, PAIRS, CHOSEN, PARTS, gl.constexpr(1))),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


# fmt: on


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
) -> Tensor:
    """As `whalepod.kernels.sparse_attention`, for bfloat16 on Hopper, 64 heads of 512 channels."""
    queries = queries.contiguous()
    rows, heads, width = queries.shape
    out = torch.empty_like(queries)
    if rows == 0:
        return out
    sizes = launch_sizes("sparse_attention_hopper", queries, rows=rows, exact=batch_invariant)
    parts = sizes["PARTS"]
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
