"""Index scores and selections in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import pad_rows, widen

KEY_TILE = 128
"""Entries of every product of one row's index heads with keys."""
ROWS_AT_ONCE = 16
"""Rows whose per-head scores are in memory together."""


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    queries, weights = widen(queries).contiguous(), widen(weights)
    tiles = pad_rows(widen(keys), KEY_TILE).unflatten(0, (-1, KEY_TILE)).transpose(1, 2)
    scores = queries.new_empty(queries.shape[0], tiles.shape[0] * KEY_TILE)
    for start in range(0, queries.shape[0], ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        scores[some] = _sum_heads(_head_scores(queries[some], tiles).mul_(weights[some, :, None]))
    return scores[:, : keys.shape[0]]


def _head_scores(queries: Tensor, tiles: Tensor) -> Tensor:
    """queries [rows, heads, width], tiles [tiles, width, KEY_TILE] -> max(0, q · k) [rows, heads, entries]."""
    out = queries.new_empty(*queries.shape[:2], tiles.shape[0] * KEY_TILE)
    product = queries.new_empty(queries.shape[1], KEY_TILE)
    for row, row_out in zip(queries, out, strict=True):
        for index, tile in enumerate(tiles):
            row_out[:, index * KEY_TILE : (index + 1) * KEY_TILE] = torch.mm(row, tile, out=product)
    return out.clamp_(min=0)


def _sum_heads(terms: Tensor) -> Tensor:
    """[rows, heads, entries] -> sum over heads, by halves: elementwise, so its order depends on no other axis."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        folded = terms[:, :half] + terms[:, half : 2 * half]
        terms = torch.cat((folded, terms[:, 2 * half :]), dim=1) if terms.shape[1] % 2 else folded
    return terms[:, 0]


def candidate_mask(scores: Tensor, visible: Tensor, *, block: int, top_blocks: int) -> Tensor:
    rows, entries = scores.shape
    blocks = -(-entries // block)
    hidden = torch.arange(entries, device=scores.device) >= visible[:, None]
    padded = scores.new_full((rows, blocks * block), -torch.inf)
    padded[:, :entries] = scores.masked_fill(hidden, -torch.inf)
    best = padded.unflatten(1, (blocks, block)).amax(dim=-1)
    numbers = torch.arange(blocks, device=scores.device)
    best = best.masked_fill(numbers == (visible[:, None] - 1) // block, torch.inf)
    kept = _best_mask(best, best > -torch.inf, top_blocks)
    return kept.repeat_interleave(block, dim=1)[:, :entries]


def select_top(scores: Tensor, allowed: Tensor, *, count: int) -> Tensor:
    chosen = _best_mask(scores, allowed, count)
    places = chosen.cumsum(dim=1) - 1
    rows, entries = chosen.nonzero(as_tuple=True)
    selected = torch.full((scores.shape[0], count), -1, dtype=torch.int64, device=scores.device)
    selected[rows, places[rows, entries]] = entries
    return selected


def _best_mask(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Marks the `count` best allowed scores of each row, all of them if there are fewer.

    Everything above the count-th best score is in; what equals it fills the rest from the lowest index on.
    """
    if scores.shape[1] <= count:
        return allowed
    values = scores.masked_fill(~allowed, -torch.inf)
    last = values.topk(count, dim=1).values[:, -1:]
    above = values > last
    equal = (values == last) & allowed
    room = count - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= room))
