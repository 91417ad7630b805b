"""Products of bfloat16 rows on a GPU, by the library: sums in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import pad_rows, tile_rows

TILE = 64
"""Rows of a product where a row's bits must not depend on how many there are: what one instruction takes."""


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    rows, each = x.shape[0], tile_rows(x.shape[0], TILE)
    if rows == each:
        return _product(x, weight, out_dtype)
    tiles = pad_rows(x, TILE)
    parts = [_product(tile, weight, out_dtype) for tile in tiles.split(each)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]


def _product(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype == x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=torch.float32).to(out_dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    rows, each = x.shape[0], tile_rows(x.shape[0], TILE)
    tiles = x if rows == each else pad_rows(x, TILE)
    out = x.new_empty(tiles.shape[0], *weight.shape[:2])
    for source, target in zip(tiles.split(each), out.split(each), strict=True):
        torch.bmm(source.transpose(0, 1), weight.transpose(1, 2), out=target.transpose(0, 1))
    return out[:rows]
