"""What the reference kernels share: the dtype they calculate in, and tiles of rows.

A row's bits must not depend on which rows come with it. Library matrix products choose their algorithm by shape, so
the reference kernels only ever call them with one fixed number of rows. Rows are padded with zeros where they do not
fill whole tiles; a caller whose rows do saves the copy.

Where that is not promised (`fidelity=fast`), `whole_batches` makes one tile of all rows. Nothing else changes.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from .native import library

ROW_TILE = 8
"""Rows of every matrix product. Larger tiles are faster for long chunks, smaller ones for single decode rows."""

_WIDE = (torch.float32, torch.float64)


class _Tiling(threading.local):
    whole = False


_tiling = _Tiling()


@contextmanager
def whole_batches(on: bool = True) -> Generator[None]:
    """Within it, on this thread, a tile is as large as the batch: quicker, and a row's last bits depend on the rows
    beside it. `on=False` goes back to fixed tiles."""
    before, _tiling.whole = _tiling.whole, on
    try:
        yield
    finally:
        _tiling.whole = before


def tiled() -> bool:
    """Whether a row's bits must not depend on the rows beside it, here and now."""
    return not _tiling.whole


def tile_rows(rows: int, tile: int = ROW_TILE) -> int:
    """How many of `rows` rows a product takes at a time: `tile`, or all."""
    return max(rows, 1) if _tiling.whole else tile


def batch_rows(rows: int) -> int:
    """How many rows a batch of `rows` is best padded to: whole tiles, or itself where products take no tiles."""
    tile = 1 if library.in_use() else tile_rows(rows)
    return -(-rows // tile) * tile


def widen(x: Tensor) -> Tensor:
    """x in the dtype that statistics, sums and softmax are calculated in: float32, or float64 if x is."""
    return x if x.dtype in _WIDE else x.to(torch.float32)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`; no call into torch if it is of that dtype."""
    return x if x.dtype is dtype else x.to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that `widen` gives."""
    return dtype if dtype in _WIDE else torch.float32


def pad_rows(x: Tensor, tile: int = ROW_TILE) -> Tensor:
    """x [rows, ...] with zero rows added up to a multiple of `tile_rows`; x itself if it is one and contiguous.

    A fresh tensor starts at an aligned address, and so does every tile of it: the address decides which code path a
    library takes.
    """
    rows = x.shape[0]
    if _tiling.whole:
        return x.contiguous()
    if rows % tile == 0 and x.is_contiguous() and x.data_ptr() % 64 == 0:
        return x
    padded = x.new_zeros(-(-rows // tile) * tile, *x.shape[1:])
    padded[:rows] = x
    return padded
