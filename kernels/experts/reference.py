"""Experts in plain torch: rows sorted by expert, each expert's rows in tiles of their own."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.activation import swiglu
from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import narrow, tile_rows, whole_batches, wide_dtype, widen
from whalepod.kernels.quantise import PackedFormat

Ints: TypeAlias = NDArray[np.int64]


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
    outputs = _pair_outputs(x, rows, ids.flatten(), gate_up, down, limit=limit, input_format=input_format)
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
    with whole_batches(False):  # The pairs of other ranks are among them.
        return _pair_outputs(x, rows, experts, gate_up, down, limit=limit, input_format=input_format)


def _pair_outputs(
    x: Tensor,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    input_format: PackedFormat | None,
) -> Tensor:
    dealt = _deal_pairs(rows.numpy(force=True), experts.numpy(force=True))
    tiles = widen(_rounded(x, input_format)).index_select(0, torch.from_numpy(dealt.rows).to(x.device))
    gate, up = _tile_products(tiles, gate_up, dealt.tiles).chunk(2, dim=-1)
    hidden = widen(_rounded(narrow(swiglu(gate, up, limit=limit), x.dtype), input_format))
    return _tile_products(hidden, down, dealt.tiles).index_select(0, torch.from_numpy(dealt.places).to(x.device))


def combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    return (outputs * weights.unsqueeze(2)).sum(dim=1)


def _rounded(x: Tensor, input_format: PackedFormat | None) -> Tensor:
    return x if input_format is None else input_format.round_trip(x)


class _Dealt(NamedTuple):
    """Pairs of a row and an expert, in tiles of one expert each."""

    rows: Ints
    """[places] the row in each place of the tiles; row 0 where a tile is not full."""
    places: Ints
    """[pairs] where each pair is."""
    tiles: list[tuple[int, int, int]]
    """Expert, first place, place after the last."""


def _deal_pairs(rows: Ints, experts: Ints) -> _Dealt:
    order = np.argsort(experts, kind="stable")
    counts = np.bincount(experts)
    tile_of = np.array([tile_rows(count) for count in counts.tolist()], np.int64)
    room = -(-counts // tile_of) * tile_of
    starts = np.cumsum(room) - room
    ranks = np.arange(len(experts)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty_like(experts)
    places[order] = starts[experts[order]] + ranks
    dealt = np.zeros(int(room.sum()), np.int64)
    dealt[places] = rows
    tiles = [
        (expert, start, start + tile)
        for expert, (first, places_held, tile) in enumerate(np.stack([starts, room, tile_of], axis=1).tolist())
        for start in range(first, first + places_held, tile)
    ]
    return _Dealt(dealt, places, tiles)


def _tile_products(places: Tensor, matrices: Tensor, tiles: list[tuple[int, int, int]]) -> Tensor:
    out = places.new_empty(places.shape[0], matrices.shape[1])
    for expert, start, end in tiles:
        torch.mm(places[start:end], widen(matrices[expert]).t(), out=out[start:end])
    return out
