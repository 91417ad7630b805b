"""Experts in plain torch: rows sorted by expert, each expert's rows in tiles of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.activation import swiglu
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import ROW_TILE, compute_dtype
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
    rows, chosen = ids.shape
    dtype = compute_dtype(x)
    place_of_pair, tile_experts = _place_pairs(ids, gate_up.shape[0])
    tiles = torch.zeros(len(tile_experts) * ROW_TILE, x.shape[1], dtype=dtype, device=x.device)
    tiles[place_of_pair.flatten()] = _rounded(x, input_format).to(dtype).repeat_interleave(chosen, 0)
    gate, up = _tile_products(tiles, gate_up, tile_experts).chunk(2, dim=-1)
    outputs = _tile_products(_rounded(swiglu(gate, up, limit=limit), input_format), down, tile_experts)
    return (outputs[place_of_pair] * weights.to(dtype)[:, :, None]).sum(dim=1)


def _rounded(x: Tensor, input_format: PackedFormat | None) -> Tensor:
    return x if input_format is None else input_format.round_trip(x)


def _place_pairs(ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Where each (row, choice) pair lies among tiles of one expert each, [rows, chosen], and the tiles' experts."""
    order = torch.sort(ids.flatten(), stable=True)
    counts = torch.bincount(order.values, minlength=experts).tolist()
    tile_experts: list[int] = []
    shifts: list[int] = []  # From a pair's place among the sorted pairs to its place among the tiles.
    pairs = 0
    for expert, count in enumerate(counts):
        shifts.append(len(tile_experts) * ROW_TILE - pairs)
        tile_experts += [expert] * -(-count // ROW_TILE)
        pairs += count
    places = torch.arange(pairs, device=ids.device) + torch.tensor(shifts, device=ids.device)[order.values]
    return torch.empty_like(places).index_copy_(0, order.indices, places).view(ids.shape), tile_experts


def _tile_products(tiles: Tensor, matrices: Tensor, tile_experts: list[int]) -> Tensor:
    out = tiles.new_empty(tiles.shape[0], matrices.shape[1])
    for tile, expert in enumerate(tile_experts):
        rows = slice(tile * ROW_TILE, (tile + 1) * ROW_TILE)
        torch.mm(tiles[rows], matrices[expert].to(tiles.dtype).t(), out=out[rows])
    return out
