"""Index scores over packed keys in plain torch: decode each sequence's keys, score, mask."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.indexer import index_scores
from whalepod.kernels.quantise import MXFP4_BLOCK32


def packed_index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    visible: Tensor,
    groups: Tensor,
    *,
    entries_per_block: int,
    entries_max: int,
) -> Tensor:
    scores = torch.full((queries.shape[0], entries_max), -torch.inf, dtype=torch.float32, device=queries.device)
    for start, count, sequence in groups.t().tolist():
        some = slice(start, start + count)
        seen = int(visible[some].max()) if count else 0
        entry = torch.arange(seen, device=queries.device)
        places = tables[sequence, entry // entries_per_block].long() * entries_per_block + entry % entries_per_block
        decoded = MXFP4_BLOCK32.decode(keys[places], queries.shape[2], torch.float32)
        own = index_scores(queries[some].float(), weights[some], decoded)
        scores[some, :seen] = own.masked_fill(entry >= visible[some, None], -torch.inf)
    return scores
