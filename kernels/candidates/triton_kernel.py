"""Candidates in Triton: the best of each block, scores of the candidates alone, and where chosen entries lie.

Rows share no candidates, so each program scores keys of one row: what binds is reading 68 bytes a key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packed_index_scores.triton_kernel import (
    CODE_BYTES,
    RECORD_BYTES,
    fp8_keys,
    query_tile,
    weighted_sums,
)


@triton.jit
def block_maxima_kernel(
    scores, stride, visible, maxima, blocks, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr
):
    """WIDE is BLOCK, or the next power of two."""
    row = tl.program_id(0)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seen = tl.load(visible + row)
    place = tl.arange(0, WIDE)[None, :]
    entry = block[:, None] * BLOCK + place
    there = (entry < seen) & (place < BLOCK)
    score = tl.load(scores + row.to(tl.int64) * stride + entry, mask=there, other=float("-inf"))
    newest = (block == (seen - 1) // BLOCK) & (seen > 0)
    best = tl.where(newest, float("inf"), tl.max(score, 1))
    tl.store(maxima + row.to(tl.int64) * blocks + block, best, mask=block < blocks)


@triton.jit
def candidate_scores_kernel(
    queries,
    weights,
    keys,
    tables,
    table_stride,
    segments,
    visible,
    blocks,
    scores,
    top_blocks,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Program (row, part): TILES tiles of KEYS candidates of one row."""
    row = tl.program_id(0)
    seen = tl.load(visible + row)
    table = tables + tl.load(segments + row).to(tl.int64) * table_stride
    query_even, query_odd, weight = query_tile(queries, weights, row, 1, 1, HEADS, FAST)
    total = top_blocks * BLOCK
    for tile in range(TILES):
        place = (tl.program_id(1) * TILES + tile) * KEYS + tl.arange(0, KEYS)
        block = tl.load(blocks + row.to(tl.int64) * top_blocks + place // BLOCK, mask=place < total, other=-1)
        entry = block * BLOCK + place % BLOCK
        there = (block >= 0) & (entry < seen)
        at = tl.load(table + entry // ENTRIES, mask=there, other=0).to(tl.int64) * ENTRIES + entry % ENTRIES
        record = keys + at[:, None] * RECORD_BYTES
        codes = tl.load(
            record.to(tl.pointer_type(tl.int8)) + tl.multiple_of(tl.arange(0, CODE_BYTES), 4)[None, :],
            mask=there[:, None],
            other=0,
        )
        scale = tl.load(record + CODE_BYTES + tl.arange(0, 4)[None, :], mask=there[:, None], other=0).to(tl.int32)
        largest = tl.max(scale, 1)
        even, odd = fp8_keys(codes, largest[:, None] - scale, KEYS, FAST)
        key_scale = (tl.maximum(largest - 6, 1) << 23).to(tl.float32, bitcast=True)
        products = tl.dot(even, tl.trans(query_even))
        products = tl.dot(odd, tl.trans(query_odd), products)
        sums = weighted_sums(products, weight, 1, HEADS, KEYS) * key_scale[:, None]
        score = tl.where(there, tl.sum(sums, 1), float("-inf"))
        tl.store(scores + row.to(tl.int64) * total + place, score, mask=place < total)


@triton.jit
def seen_candidates_kernel(blocks, visible, counts, top_blocks, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    slot = tl.arange(0, WIDE)
    block = tl.load(blocks + row * top_blocks + slot, mask=slot < top_blocks, other=-1)
    each = tl.minimum((block + 1) * BLOCK, seen) - block * BLOCK
    tl.store(counts + row, tl.sum(tl.where(block >= 0, each, 0), 0))


@triton.jit
def entry_places_kernel(
    chosen,
    tables,
    table_stride,
    segments,
    blocks,
    top_blocks,
    entries,
    places,
    count,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    RESTRICTED: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDE)
    entry = tl.load(chosen + row * count + slot, mask=slot < count, other=-1)
    there = entry >= 0
    if RESTRICTED:
        block = tl.load(blocks + row * top_blocks + entry // BLOCK, mask=there, other=0)
        entry = tl.where(there, block * BLOCK + entry % BLOCK, -1)
    table = tables + tl.load(segments + row).to(tl.int64) * table_stride
    place = tl.load(table + entry // ENTRIES, mask=there, other=0) * ENTRIES + entry % ENTRIES
    tl.store(entries + row * count + slot, entry, mask=slot < count)
    tl.store(places + row * count + slot, tl.where(there, place, -1), mask=slot < count)


def block_maxima(scores: Tensor, visible: Tensor, *, block: int) -> Tensor:
    """As `reference.block_maxima`, on a GPU, or in Triton's interpreter."""
    rows, entries = scores.shape
    blocks = triton.cdiv(entries, block)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    wide = triton.next_power_of_2(block)
    sizes = launch_sizes("block_maxima", scores, rows=rows, shape=block)
    chunk = max(1, sizes["entries"] // wide)
    if rows and blocks:
        block_maxima_kernel[(rows, triton.cdiv(blocks, chunk))](
            scores,
            scores.stride(0),
            visible,
            maxima,
            blocks,
            BLOCK=block,
            WIDE=wide,
            CHUNK=chunk,
            num_warps=sizes["num_warps"],
        )
    return maxima


def candidate_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    segments: Tensor,
    visible: Tensor,
    blocks: Tensor,
    *,
    block: int,
    entries_per_block: int,
) -> Tensor:
    """As `whalepod.kernels.candidates.candidate_scores`, for bfloat16 on a GPU, or anything in Triton's interpreter."""
    rows, heads, _ = queries.shape
    top_blocks = blocks.shape[1]
    total = top_blocks * block
    scores = torch.empty(rows, total, dtype=torch.float32, device=queries.device)
    sizes = launch_sizes("candidate_scores", queries, rows=rows, shape=heads)
    if rows:
        candidate_scores_kernel[(rows, triton.cdiv(total, sizes["KEYS"] * sizes["TILES"]))](
            queries.contiguous(),
            weights,
            keys,
            tables,
            tables.stride(0),
            segments,
            visible,
            blocks,
            scores,
            top_blocks,
            BLOCK=block,
            ENTRIES=entries_per_block,
            HEADS=heads,
            FAST=queries.is_cuda,
            **sizes,
        )
    return scores


def seen_candidates(blocks: Tensor, visible: Tensor, *, block: int) -> Tensor:
    """As `reference.seen_candidates`."""
    rows, top_blocks = blocks.shape
    counts = torch.empty(rows, dtype=torch.int32, device=blocks.device)
    if rows:
        seen_candidates_kernel[(rows,)](
            blocks, visible, counts, top_blocks, BLOCK=block, WIDE=triton.next_power_of_2(top_blocks), num_warps=4
        )
    return counts


def entry_places(
    chosen: Tensor, tables: Tensor, segments: Tensor, blocks: Tensor | None, *, block: int, entries_per_block: int
) -> tuple[Tensor, Tensor]:
    """As `whalepod.kernels.candidates.entry_places`."""
    rows, count = chosen.shape
    entries, places = (torch.empty(rows, count, dtype=torch.int32, device=chosen.device) for _ in range(2))
    if rows and count:
        entry_places_kernel[(rows,)](
            chosen.contiguous(),
            tables,
            tables.stride(0),
            segments,
            chosen if blocks is None else blocks,
            0 if blocks is None else blocks.shape[1],
            entries,
            places,
            count,
            BLOCK=block,
            ENTRIES=entries_per_block,
            RESTRICTED=blocks is not None,
            WIDE=triton.next_power_of_2(count),
            num_warps=4,
        )
    return entries, places
