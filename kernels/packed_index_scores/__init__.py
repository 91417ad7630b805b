"""Index scores over packed MXFP4 keys where they lie in blocks; rows of one sequence share the keys that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import MXFP4_BLOCK32

from . import reference

__all__ = ["packed_index_scores"]


def packed_index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    segments: Tensor,
    visible: Tensor,
    groups: Tensor,
    *,
    entries_per_block: int,
    group_rows: int,
    entries_max: int,
) -> Tensor:
    """Σ_h weights_h · max(0, query_h · key) -> [rows, entries_max] float32; entries from visible[row] on are undefined.

    queries  [rows, heads, 128], after their MXFP4 round trip
    weights  [rows, heads] float32
    keys     [pool, 68] uint8, `MXFP4_BLOCK32` records, flat over blocks
    tables   [sequences, blocks] int32: entry j of a sequence lies at tables[.., j // entries_per_block] of the pool
    segments [rows] int32: the sequence of each row
    visible  [rows] int32: row sees entries 0 … visible - 1; ascending within a group
    groups   [3, groups] int32: first row, number of rows (up to `group_rows`) and sequence of each group

    On a GPU products are FP8, exact but for groups of channels below 2^-11 of their key's largest. Hopper's matrix
    units keep some 14 bits below the largest of those that they add: scores are within 1e-7 for normal keys, within
    2e-4 for keys whose groups differ by 2^11. Sums over heads are float32.
    """
    rows, heads, width = queries.shape
    assert keys.shape[1] == MXFP4_BLOCK32.record_bytes(width), (queries.shape, keys.shape)
    assert weights.shape == queries.shape[:2] and visible.shape == (rows,), (weights.shape, visible.shape)
    assert segments.shape == visible.shape, (segments.shape, visible.shape)
    if not queries.is_cuda:
        arguments = (queries, weights, keys, tables, visible, groups)
        return reference.packed_index_scores(*arguments, entries_per_block=entries_per_block, entries_max=entries_max)
    if queries.dtype != torch.bfloat16 or width != 128:
        from .any_width_kernel import any_width_scores

        reason = f"queries are {queries.dtype} of {width} channels"
        note_fallback("packed_index_scores", reason, runs="its kernel for keys of any width, which is slower")
        return any_width_scores(
            queries,
            weights,
            keys,
            tables,
            segments,
            visible,
            None,
            block=1,
            entries_per_block=entries_per_block,
            total=entries_max,
        )
    # The Hopper kernel's products are as wide as two rows' heads.
    if torch.cuda.get_device_capability(queries.device)[0] == 9 and heads in (16, 32, 64):
        from .gluon_kernel import packed_index_scores as on_gpu
    else:
        from .triton_kernel import packed_index_scores as on_gpu
    return on_gpu(
        queries,
        weights,
        keys,
        tables,
        visible,
        groups,
        entries_per_block=entries_per_block,
        group_rows=group_rows,
        entries_max=entries_max,
    )
