"""Matrix products in tiles of a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import narrow, pad_rows, tile_rows, widen

CHANNELS = 8
"""Rows are padded to a multiple of this many channels, or their addresses would decide how the library sums them."""


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    tiles, weight = widen(x), widen(weight)
    if missing := -x.shape[1] % CHANNELS:
        tiles, weight = functional.pad(tiles, (0, missing)), functional.pad(weight, (0, missing))
    tiles, tile = pad_rows(tiles), tile_rows(x.shape[0])
    if tiles.shape[0] == tile:
        out = functional.linear(tiles, weight)
    else:
        out = tiles.new_empty(tiles.shape[0], weight.shape[0])
        columns = weight.t()
        for start in range(0, tiles.shape[0], tile):
            torch.mm(tiles[start : start + tile], columns, out=out[start : start + tile])
    return narrow(out if out.shape[0] == x.shape[0] else out[: x.shape[0]], out_dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    tiles, tile, matrices = pad_rows(widen(x)), tile_rows(x.shape[0]), widen(weight).transpose(1, 2)
    out = tiles.new_empty(tiles.shape[0], *weight.shape[:2])
    for start in range(0, tiles.shape[0], tile):
        by_group = tiles[start : start + tile].transpose(0, 1).contiguous()
        out[start : start + tile] = torch.bmm(by_group, matrices).transpose(0, 1)
    return narrow(out if out.shape[0] == x.shape[0] else out[: x.shape[0]], x.dtype)
