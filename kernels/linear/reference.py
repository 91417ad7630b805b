"""Matrix products in tiles of a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.numerics import ROW_TILE, compute_dtype, pad_rows


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    dtype = compute_dtype(x)
    tiles = pad_rows(x.to(dtype))
    columns = weight.to(dtype).t()
    out = tiles.new_empty(tiles.shape[0], weight.shape[0])
    for start in range(0, tiles.shape[0], ROW_TILE):
        torch.mm(tiles[start : start + ROW_TILE], columns, out=out[start : start + ROW_TILE])
    return out[: x.shape[0]].to(out_dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    dtype = compute_dtype(x)
    tiles = pad_rows(x.to(dtype))
    out = tiles.new_empty(tiles.shape[0], *weight.shape[:2])
    matrices = weight.to(dtype).transpose(1, 2)
    for start in range(0, tiles.shape[0], ROW_TILE):
        product = torch.bmm(tiles[start : start + ROW_TILE].transpose(0, 1).contiguous(), matrices)
        out[start : start + ROW_TILE] = product.transpose(0, 1)
    return out[: x.shape[0]].to(x.dtype)
