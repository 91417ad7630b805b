"""Matrix products in tiles of a fixed number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import narrow, pad_rows, tile_rows, widen

CHANNELS = 8
"""Matrices are padded to multiples of this many channels, in and out: a library sums narrow ones in an order that the
address of a row decides."""


def linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    rows, outputs = x.shape[0], weight.shape[0]
    tiles, weight, tile = pad_rows(_pad_channels(widen(x))), _pad_outputs(_pad_channels(widen(weight))), tile_rows(rows)
    if tiles.shape[0] == tile:
        out = functional.linear(tiles, weight)
    else:
        out = tiles.new_empty(tiles.shape[0], weight.shape[0])
        columns = weight.t()
        for start in range(0, tiles.shape[0], tile):
            torch.mm(tiles[start : start + tile], columns, out=out[start : start + tile])
    return narrow(_unpadded(out, rows, outputs), out_dtype)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    rows, outputs = x.shape[0], weight.shape[1]
    tiles, weight, tile = pad_rows(_pad_channels(widen(x))), _pad_outputs(_pad_channels(widen(weight))), tile_rows(rows)
    matrices = weight.transpose(1, 2)
    out = tiles.new_empty(tiles.shape[0], *weight.shape[:2])
    for start in range(0, tiles.shape[0], tile):
        by_group = tiles[start : start + tile].transpose(0, 1).contiguous()
        out[start : start + tile] = torch.bmm(by_group, matrices).transpose(0, 1)
    return narrow(_unpadded(out, rows, outputs), x.dtype)


def _pad_channels(x: Tensor) -> Tensor:
    return functional.pad(x, (0, missing)) if (missing := -x.shape[-1] % CHANNELS) else x


def _pad_outputs(weight: Tensor) -> Tensor:
    return functional.pad(weight, (0, 0, 0, missing)) if (missing := -weight.shape[-2] % CHANNELS) else weight


def _unpadded(out: Tensor, rows: int, outputs: int) -> Tensor:
    return out if out.shape[0] == rows and out.shape[-1] == outputs else out[:rows, ..., :outputs].contiguous()
