"""Attention over gathered keys, matrix products in batches of a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import narrow, pad_rows, tile_rows, widen


def sink_attention(queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, *, scale: float) -> Tensor:
    tiles, key_tiles, rows = pad_rows(widen(queries)), pad_rows(widen(keys)), tile_rows(queries.shape[0])
    weights = tiles.new_empty(*tiles.shape[:2], keys.shape[1])
    for start in range(0, tiles.shape[0], rows):
        tile = slice(start, start + rows)
        torch.bmm(tiles[tile], key_tiles[tile].transpose(1, 2), out=weights[tile])
    scores = weights[: queries.shape[0]].mul_(scale).masked_fill_(~valid.unsqueeze(1), -torch.inf)
    sink = sink.unsqueeze(1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    scores.sub_(highest).exp_()
    denominators = scores.sum(dim=-1, keepdim=True) + torch.exp(sink - highest)
    out = torch.empty_like(tiles)
    for start in range(0, tiles.shape[0], rows):
        tile = slice(start, start + rows)
        torch.bmm(weights[tile], key_tiles[tile], out=out[tile])
    return narrow(out[: queries.shape[0]].div_(denominators), queries.dtype)
