"""Candidates in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.indexer import index_scores
from whalepod.kernels.quantise import MXFP4_BLOCK32


def block_maxima(scores: Tensor, visible: Tensor, *, block: int) -> Tensor:
    """[rows, blocks] float32: the best visible score of each block, infinity for the one with the newest entry."""
    rows, entries = scores.shape
    blocks = -(-entries // block)
    hidden = torch.arange(entries, device=scores.device) >= visible[:, None]
    padded = scores.new_full((rows, blocks * block), -torch.inf)
    padded[:, :entries] = scores.masked_fill(hidden, -torch.inf)
    newest = torch.arange(blocks, device=scores.device) == (visible[:, None] - 1) // block
    return padded.unflatten(1, (blocks, block)).amax(dim=-1).masked_fill(newest, torch.inf)


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
    offsets = torch.arange(block, device=blocks.device)
    entries = (blocks[:, :, None] * block + offsets).flatten(1)
    seen = (blocks >= 0).repeat_interleave(block, dim=1) & (entries < visible[:, None])
    _, places = entry_places(
        torch.where(seen, entries, -1), tables, segments, None, block=1, entries_per_block=entries_per_block
    )
    scores = torch.full(entries.shape, -torch.inf, dtype=torch.float32, device=queries.device)
    for row in range(queries.shape[0]):
        decoded = MXFP4_BLOCK32.decode(keys[places[row].clamp(min=0).long()], queries.shape[2], torch.float32)
        own = index_scores(queries[row : row + 1].float(), weights[row : row + 1], decoded)
        scores[row] = own[0].masked_fill(~seen[row], -torch.inf)
    return scores


def seen_candidates(blocks: Tensor, visible: Tensor, *, block: int) -> Tensor:
    """How many entries of the blocks a row sees [rows] int32. Only the last block, the newest, is seen in part."""
    ends = (blocks + 1) * block
    return (torch.minimum(ends, visible[:, None]) - blocks * block).masked_fill(blocks < 0, 0).sum(dim=1).int()


def entry_places(
    chosen: Tensor, tables: Tensor, segments: Tensor, blocks: Tensor | None, *, block: int, entries_per_block: int
) -> tuple[Tensor, Tensor]:
    there, chosen = chosen >= 0, chosen.clamp(min=0).long()
    entries = chosen if blocks is None else blocks.gather(1, chosen // block).long() * block + chosen % block
    entries = entries.clamp(min=0)
    places = tables[segments[:, None].long(), entries // entries_per_block].long()
    places = places * entries_per_block + entries % entries_per_block
    return torch.where(there, entries, -1).int(), torch.where(there, places, -1).int()
