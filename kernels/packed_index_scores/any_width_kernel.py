"""Index scores for keys of any width in Triton, one row a program and no matrix products: for models whose keys are
not the released one's 128 channels. Exact in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import e2m1_values, power_of_two

GROUP = tl.constexpr(32)


@triton.jit
def any_width_kernel(
    queries,
    weights,
    keys,
    tables,
    table_stride,
    segments,
    visible,
    blocks,
    top_blocks,
    scores,
    stride,
    total,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    RESTRICTED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (row, tile). With RESTRICTED, place i stands for entry blocks[row, i // BLOCK] · BLOCK + i mod BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = place < total
    entry = place
    if RESTRICTED:
        block = tl.load(blocks + row * top_blocks + place // BLOCK, mask=there, other=-1)
        there = there & (block >= 0)
        entry = block * BLOCK + place % BLOCK
    there = there & (entry < tl.load(visible + row))
    table = tables + tl.load(segments + row).to(tl.int64) * table_stride
    at = tl.load(table + entry // ENTRIES, mask=there, other=0).to(tl.int64) * ENTRIES + entry % ENTRIES
    record = keys + at[:, None] * (WIDTH // 2 + WIDTH // GROUP)
    half = tl.arange(0, WIDTH // 2)
    # Without the hint the compiler takes every record to be as aligned as the first of a block.
    codes = tl.load(record + tl.multiple_of(half, 1)[None, :], mask=there[:, None], other=0).to(tl.int32)
    scale = tl.load(record + WIDTH // 2 + half[None, :] // (GROUP // 2), mask=there[:, None], other=127).to(tl.int32)
    scale = power_of_two(scale)
    even, odd = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    sums = tl.zeros((KEYS,), tl.float32)
    for head in range(HEADS):
        query = queries + (row * HEADS + head) * WIDTH + 2 * half
        products = even * tl.load(query).to(tl.float32)[None, :] + odd * tl.load(query + 1).to(tl.float32)[None, :]
        sums += tl.maximum(tl.sum(products, 1), 0.0) * tl.load(weights + row * HEADS + head)
    tl.store(scores + row * stride + place, tl.where(there, sums, float("-inf")), mask=place < total)


def any_width_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    segments: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    *,
    block: int,
    entries_per_block: int,
    total: int,
) -> Tensor:
    """[rows, total] float32: of the entries 0 … total - 1, or of the candidates in `blocks`; -inf where not seen.

    Arguments as `whalepod.kernels.candidates.candidate_scores`.
    """
    rows, heads, width = queries.shape
    scores = torch.empty(rows, total, dtype=torch.float32, device=queries.device)
    if rows and total:
        any_width_kernel[(rows, triton.cdiv(total, 64))](
            queries.contiguous(),
            weights,
            keys,
            tables,
            tables.stride(0),
            segments,
            visible,
            visible if blocks is None else blocks,
            0 if blocks is None else blocks.shape[1],
            scores,
            scores.stride(0),
            total,
            WIDTH=width,
            HEADS=heads,
            ENTRIES=entries_per_block,
            BLOCK=block,
            RESTRICTED=blocks is not None,
            KEYS=64,
            num_warps=4,
        )
    return scores
