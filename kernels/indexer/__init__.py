"""Which entries of the global KV a row attends to: scores, blocks of candidates, the best few."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """queries [rows, heads, width], weights [rows, heads], keys [entries, width] of one sequence
    -> [rows, entries] in at least float32: Σ_h weight_h · max(0, query_h · key).

    A score's bits do not depend on how many rows or entries there are.
    """
    assert queries.shape == (*weights.shape, keys.shape[1]), (queries.shape, weights.shape, keys.shape)
    if library.takes(queries, weights, keys):
        return native.index_scores(queries, weights, keys)
    return reference.index_scores(queries, weights, keys)


def candidate_mask(scores: Tensor, visible: Tensor, *, block: int, top_blocks: int) -> Tensor:
    """scores [rows, entries], visible [rows] (entries 0 … visible-1 are) -> bool [rows, entries], the entries, visible
    or not, of the `top_blocks` best blocks of `block` consecutive entries.

    A block scores as its best visible entry; the one with the newest visible entry is always kept, one without a
    visible entry never. Ties go to the lower block.
    """
    assert visible.shape == scores.shape[:1], (scores.shape, visible.shape)
    if library.takes(scores):
        return native.candidate_mask(scores, visible, block=block, top_blocks=top_blocks)
    return reference.candidate_mask(scores, visible, block=block, top_blocks=top_blocks)


def select_top(scores: Tensor, allowed: Tensor, *, count: int) -> Tensor:
    """scores [rows, entries], allowed [rows, entries] bool -> [rows, count] int64: the best allowed entries of each
    row, ascending, then -1. Ties go to the lower entry, whatever the width."""
    assert scores.shape == allowed.shape, (scores.shape, allowed.shape)
    if library.takes(scores):
        return native.select_top(scores, allowed, count=count)
    return reference.select_top(scores, allowed, count=count)
