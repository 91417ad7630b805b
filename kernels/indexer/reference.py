"""Index scores and selections in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import pad_rows, tile_rows, widen

KEY_TILE = 128
"""Entries of every product of a tile of rows with keys."""


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    rows, heads, _ = queries.shape
    queries, weights = pad_rows(widen(queries)), pad_rows(widen(weights))
    row_tile, key_tile = tile_rows(rows), tile_rows(keys.shape[0], KEY_TILE)
    tiles = pad_rows(widen(keys), KEY_TILE).unflatten(0, (-1, key_tile)).transpose(1, 2)
    scores = queries.new_empty(queries.shape[0], tiles.shape[0] * key_tile)
    products = queries.new_empty(tiles.shape[0], row_tile * heads, key_tile)
    for start in range(0, queries.shape[0], row_tile):
        some = slice(start, start + row_tile)
        for tile, product in zip(tiles, products, strict=True):
            torch.mm(queries[some].flatten(0, 1), tile, out=product)
        by_head = products.unflatten(1, (row_tile, heads)).permute(1, 2, 0, 3).flatten(2)
        scores[some] = _sum_heads(by_head.clamp_(min=0).mul_(weights[some].unsqueeze(2)))
    return scores[:rows, : keys.shape[0]]


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
