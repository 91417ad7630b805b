"""Experts in plain torch: rows sorted by expert, each expert's rows in tiles of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.activation import swiglu
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import ROW_TILE, narrow, wide_dtype, widen
from whalepod.kernels.quantise import PackedFormat


def dense_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, input_format: PackedFormat | None
) -> Tensor:
    gate, up = linear(_rounded(x, input_format), gate_up).chunk(2, dim=-1)
    return linear(_rounded(swiglu(gate, up, limit=limit), input_format), down)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    rows = torch.arange(ids.shape[0], device=x.device).repeat_interleave(ids.shape[1])
    outputs = expert_outputs(x, rows, ids.flatten(), gate_up, down, limit=limit, input_format=input_format)
    return combine_outputs(outputs.unflatten(0, ids.shape), weights.to(wide_dtype(x.dtype)))


def expert_outputs(
    x: Tensor,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    tile_experts, tile_rows, places = _place_pairs(rows.tolist(), experts.tolist())
    tiles = widen(_rounded(x, input_format)).index_select(
        0, torch.tensor(tile_rows, dtype=torch.int64, device=x.device)
    )
    gate, up = _tile_products(tiles, gate_up, tile_experts).chunk(2, dim=-1)
    hidden = widen(_rounded(narrow(swiglu(gate, up, limit=limit), x.dtype), input_format))
    return _tile_products(hidden, down, tile_experts).index_select(
        0, torch.tensor(places, dtype=torch.int64, device=x.device)
    )


def combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs * weights.unsqueeze(2)).sum(dim=1)


def _rounded(x: Tensor, input_format: PackedFormat | None) -> Tensor:
    return x if input_format is None else input_format.round_trip(x)


def _place_pairs(rows: list[int], experts: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Deal pairs of a row and an expert into tiles of one expert each.

    Returns the expert of each tile, the row in each place of the tiles (row 0 where a tile is not full), and the place
    of each pair.
    """
    tile_experts: list[int] = []
    tile_rows: list[int] = []
    places: list[int] = []
    open_places: dict[int, tuple[int, int]] = {}  # Expert -> the next free place and the end of its tile.
    for row, expert in zip(rows, experts, strict=True):
        place, end = open_places.get(expert, (0, 0))
        if place == end:
            place, end = len(tile_rows), len(tile_rows) + ROW_TILE
            tile_experts.append(expert)
            tile_rows += [0] * ROW_TILE
        tile_rows[place] = row
        places.append(place)
        open_places[expert] = (place + 1, end)
    return tile_experts, tile_rows, places


def _tile_products(tiles: Tensor, matrices: Tensor, tile_experts: list[int]) -> Tensor:
    out = tiles.new_empty(tiles.shape[0], matrices.shape[1])
    for tile, expert in enumerate(tile_experts):
        rows = slice(tile * ROW_TILE, (tile + 1) * ROW_TILE)
        torch.mm(tiles[rows], widen(matrices[expert]).t(), out=out[rows])
    return out
