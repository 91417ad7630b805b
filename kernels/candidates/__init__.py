"""Entries that index sources above the candidate source may choose from: blocks of them, each row its own.

scores ─ candidate_blocks ─▶ blocks ─ candidate_scores ─▶ scores of those entries alone ─ top_entries ─┐
                                └──────────────────────── entry_places ◀──────────────────────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import MXFP4_BLOCK32
from whalepod.kernels.top_entries import top_entries

from . import reference

__all__ = ["candidate_blocks", "candidate_scores", "entry_places"]


def candidate_blocks(scores: Tensor, visible: Tensor, *, block: int, top_blocks: int) -> Tensor:
    """scores [rows, entries], visible [rows] int32 -> [rows, top_blocks] int32: the best blocks of `block` consecutive
    entries, ascending, then -1.

    A block scores as its best visible entry; the one with the newest visible entry is always among them, one without a
    visible entry never. Ties go to the lower block. Scores from visible on may be anything.
    """
    assert visible.shape == scores.shape[:1], (scores.shape, visible.shape)
    if not scores.is_cuda:
        maxima = reference.block_maxima(scores, visible, block=block)
    else:
        from .triton_kernel import block_maxima

        maxima = block_maxima(scores, visible, block=block)
    return top_entries(maxima, (visible + (block - 1)) // block, count=top_blocks)


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
) -> tuple[Tensor, Tensor]:
    """Index scores of a row's candidates alone -> scores [rows, top_blocks · block] float32, of entry
    blocks[row, i // block] · block + i mod block at i, and how many of them the row sees [rows] int32: the first ones.

    queries [rows, heads, width] after their round trip, weights [rows, heads] float32, keys [pool, record_bytes] uint8
    (`MXFP4_BLOCK32`), tables [sequences, blocks of the pool] int32, segments [rows] int32 (a row's sequence), visible
    [rows] int32, blocks as `candidate_blocks` gives them. Scores that a row does not see are undefined.
    """
    rows, _, width = queries.shape
    assert keys.shape[1] == MXFP4_BLOCK32.record_bytes(width) and blocks.shape[0] == rows, (keys.shape, blocks.shape)
    arguments = (queries, weights, keys, tables, segments, visible, blocks)
    sizes = {"block": block, "entries_per_block": entries_per_block}
    if not queries.is_cuda:
        return reference.candidate_scores(*arguments, **sizes), reference.seen_candidates(blocks, visible, block=block)
    if queries.dtype != torch.bfloat16 or width != 128:
        from whalepod.kernels.packed_index_scores.any_width_kernel import any_width_scores

        reason = f"queries are {queries.dtype} of {width} channels"
        note_fallback("candidate_scores", reason, runs="its kernel for keys of any width, which is slower")
        scores = any_width_scores(*arguments, **sizes, total=blocks.shape[1] * block)
    else:
        from .triton_kernel import candidate_scores as on_gpu

        scores = on_gpu(*arguments, **sizes)
    from .triton_kernel import seen_candidates

    return scores, seen_candidates(blocks, visible, block=block)


def entry_places(
    chosen: Tensor,
    tables: Tensor,
    segments: Tensor,
    blocks: Tensor | None = None,
    *,
    block: int = 1,
    entries_per_block: int,
) -> tuple[Tensor, Tensor]:
    """chosen [rows, count] int32, -1 for none -> the entries they are and their places in a pool, both [rows, count]
    int32, -1 where there is none. With `blocks`, what is chosen are places among a row's candidates.

    tables [sequences, blocks of the pool] int32, segments [rows] int32.
    """
    assert segments.shape == chosen.shape[:1], (chosen.shape, segments.shape)
    sizes = {"block": block, "entries_per_block": entries_per_block}
    if not chosen.is_cuda:
        return reference.entry_places(chosen, tables, segments, blocks, **sizes)
    from .triton_kernel import entry_places as on_gpu

    return on_gpu(chosen, tables, segments, blocks, **sizes)
