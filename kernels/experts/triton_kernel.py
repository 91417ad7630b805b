"""Experts in Triton: one grouped product for gates and values with SwiGLU behind it, one for the way down, one sum.

(row, choice) pairs are dealt into tiles of one expert each on the device, so nothing waits for the host, and a graph
can hold it: there are always as many programs as the worst distribution needs, and the rest end at
once. A pair's result does not depend on what else is in its tile; the sum over a row's choices has a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.linear.cuda import linear
from whalepod.kernels.numerics import whole_batches
from whalepod.kernels.packing_kernel import begin_early, comes_early, rounded, sigmoid
from whalepod.kernels.quantise import PackedFormat
from whalepod.kernels.quantise.triton_kernel import fp8_block32_round_trip, fp8_round_trip


@triton.jit
def _swiglu(gate, up, limit):
    gate = tl.minimum(gate, limit)
    return gate * sigmoid(gate) * tl.clamp(up, -limit, limit)


@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(
    gate_up,
    out,
    limit,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUND: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_early(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = (row < rows) & (column < columns)
    gate = tl.load(gate_up + row * 2 * columns + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=there, other=0.0).to(tl.float32)
    hidden = rounded(_swiglu(gate, up, limit), gate_up.dtype.element_ty)
    if ROUND:
        hidden = fp8_round_trip(hidden, ROWS, COLUMNS)
    tl.store(out + row * columns + column, hidden, mask=there)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(ids, counts, pairs, BLOCK: tl.constexpr):
    """Pairs of each expert."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=0)
    tl.atomic_add(counts + expert, 1, mask=pair < pairs, sem="relaxed")


@triton.jit(do_not_specialize=["tiles"])
def tiles_kernel(
    counts,
    tile_experts,
    starts,
    ends,
    tiles,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    expert = tl.arange(0, WIDE)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    end = tl.cumsum(count, 0)
    tile_end = tl.cumsum((count + ROWS - 1) // ROWS, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # The expert of a tile: how many experts' tiles all lie before it.
    owner = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = expert[None, :] == owner[:, None]
    first = tl.sum(tl.where(mine, (tile_end - (count + ROWS - 1) // ROWS)[None, :], 0), 1)
    start = tl.sum(tl.where(mine, (end - count)[None, :], 0), 1)
    last = tl.sum(tl.where(mine, end[None, :], 0), 1)
    there = tile < tiles
    tl.store(tile_experts + tile, tl.minimum(owner, EXPERTS), mask=there)
    tl.store(starts + tile, start + (tile - first) * ROWS, mask=there)
    tl.store(ends + tile, last, mask=there)


@triton.jit(do_not_specialize=["pairs"])
def order_kernel(ids, counts, cursors, order, pairs, EXPERTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Give each pair a place among its expert's."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pair < pairs
    chosen = tl.load(ids + pair, mask=there, other=0)
    expert = tl.arange(0, WIDE)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    start = tl.gather(tl.cumsum(count, 0) - count, chosen.to(tl.int32), 0)
    place = start + tl.atomic_add(cursors + chosen, 1, mask=there, sem="relaxed")
    tl.store(order + place, pair, mask=there)


@triton.jit
def _tile(tile_experts, tile_starts, tile_ends, tile, ROWS: tl.constexpr):
    expert = tl.load(tile_experts + tile)
    place = tl.load(tile_starts + tile) + tl.arange(0, ROWS)
    return expert, place, place < tl.load(tile_ends + tile)


@triton.jit
def gate_up_kernel(
    x,
    order,
    tile_experts,
    tile_starts,
    tile_ends,
    gate_up,
    hidden,
    limit,
    columns,
    choices,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ROUND: tl.constexpr,
    FAST: tl.constexpr,
):
    """Program (columns, tile): hidden values [pairs, columns], pairs in the order of their experts."""
    expert, place, there = _tile(tile_experts, tile_starts, tile_ends, tl.program_id(1), ROWS)
    if expert < EXPERTS:
        row = tl.load(order + place, mask=there, other=0) // choices
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < columns)[None, :]
        channel = tl.arange(0, STEP)
        left = x + row.to(tl.int64)[:, None] * WIDTH + channel[None, :]
        right = gate_up + expert.to(tl.int64) * 2 * columns * WIDTH + column[None, :].to(tl.int64) * WIDTH
        right += channel[:, None]
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, STEP):
            here = start + channel < WIDTH
            a = tl.load(left + start, mask=there[:, None] & here[None, :], other=0.0)
            b = tl.load(right + start, mask=inside & here[:, None], other=0.0)
            c = tl.load(right + start + columns * WIDTH, mask=inside & here[:, None], other=0.0)
            if not FAST:
                a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
            gate = tl.dot(a, b, gate)
            up = tl.dot(a, c, up)
        dtype = x.dtype.element_ty
        value = rounded(_swiglu(rounded(gate, dtype), rounded(up, dtype), limit), dtype)
        if ROUND:
            value = fp8_round_trip(value, ROWS, COLUMNS)
        tl.store(hidden + place.to(tl.int64)[:, None] * columns + column[None, :], value, mask=there[:, None] & inside)


@triton.jit
def down_kernel(
    hidden,
    order,
    tile_experts,
    tile_starts,
    tile_ends,
    down,
    weights,
    out,
    width,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    FAST: tl.constexpr,
):
    """Program (columns, tile): weighted results [pairs, width] float32, pairs in the order of rows and choices."""
    expert, place, there = _tile(tile_experts, tile_starts, tile_ends, tl.program_id(1), ROWS)
    if expert < EXPERTS:
        pair = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (column < width)[None, :]
        channel = tl.arange(0, STEP)
        left = hidden + place.to(tl.int64)[:, None] * WIDTH + channel[None, :]
        right = down + (expert.to(tl.int64) * width + column[None, :]) * WIDTH + channel[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, STEP):
            here = start + channel < WIDTH
            a = tl.load(left + start, mask=there[:, None] & here[None, :], other=0.0)
            b = tl.load(right + start, mask=inside & here[:, None], other=0.0)
            if not FAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total)
        weight = tl.load(weights + pair, mask=there, other=0.0)
        target = out + pair.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, total * weight[:, None], mask=there[:, None] & inside)


@triton.jit
def sum_choices_kernel(parts, out, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        total += tl.load(parts + (row * CHOICES + choice) * width + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, total, mask=column < width)


def tile_rows(ids: Tensor, experts: int) -> int:
    """Rows of a tile: enough for most experts' shares of the pairs in `ids`, at least what one matrix instruction
    takes; always that where a row's bits must not depend on the others."""
    return launch_sizes("expert_tiles", ids, rows=triton.cdiv(ids.numel(), experts))["ROWS"]


def deal_tiles(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [pairs] int64 -> pairs in the order of their experts, and of each tile the expert (`experts`: none) and the
    places where its pairs start and end in that order; int32. In which order an expert has its pairs is left open: what
    comes of a pair does not depend on it."""
    pairs = ids.shape[0]
    counts, cursors = torch.zeros(2, experts, dtype=torch.int32, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = min(pairs, experts) + pairs // rows
    tile_experts, starts, ends = torch.empty(3, tiles, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(pairs, 256),)
    count_kernel[grid](ids, counts, pairs, BLOCK=256, num_warps=4)
    wide = triton.next_power_of_2(experts)
    tiles_kernel[(triton.cdiv(tiles, 64),)](
        counts, tile_experts, starts, ends, tiles, EXPERTS=experts, WIDE=wide, ROWS=rows, TILES=64, num_warps=4
    )
    order_kernel[grid](ids, counts, cursors, order, pairs, EXPERTS=experts, WIDE=wide, BLOCK=256, num_warps=4)
    return order, tile_experts, starts, ends


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
    """As `whalepod.kernels.experts.routed_experts`, for bfloat16 on a GPU, or in Triton's interpreter."""
    rows, choices = ids.shape
    if rows == 0:
        return torch.empty(rows, x.shape[1], dtype=torch.float32, device=x.device)
    each = tile_rows(ids, gate_up.shape[0])
    dealt = deal_tiles(ids.flatten(), gate_up.shape[0], each)
    x = x.contiguous() if input_format is None else fp8_block32_round_trip(x)
    parts = _weighted_parts(
        x, choices, dealt, each, weights, gate_up, down, limit=limit, rounds=input_format is not None
    )
    return _sum_choices(parts, choices)


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
    """As `whalepod.kernels.experts.expert_outputs`, for the same. A pair has the bits that it has in `routed_experts`
    with tiles, before its weight."""
    pairs, held = len(rows), gate_up.shape[0]
    if pairs == 0:
        return torch.empty(pairs, x.shape[1], dtype=torch.float32, device=x.device)
    x = x.contiguous() if input_format is None else fp8_block32_round_trip(x)
    with whole_batches(False):  # The pairs of other ranks are among them.
        each = tile_rows(rows, held)
    dealt = deal_tiles(experts, held + 1, each)  # Pairs without an expert go to one that the products pass over.
    ones = torch.ones(pairs, dtype=torch.float32, device=x.device)
    return _weighted_parts(
        x.index_select(0, rows), 1, dealt, each, ones, gate_up, down, limit=limit, rounds=input_format is not None
    )


def combine_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    """As `whalepod.kernels.experts.combine_outputs`, for float32 on a GPU, or in Triton's interpreter."""
    return _sum_choices((outputs * weights.unsqueeze(2)).flatten(0, 1), outputs.shape[1])


def _weighted_parts(
    x: Tensor,
    choices: int,
    dealt: tuple[Tensor, Tensor, Tensor, Tensor],
    each: int,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float,
    rounds: bool,
) -> Tensor:
    """x [rows, D] rounded, pair i of row i // choices, `weights` of every pair -> weight · expert(row) [pairs, D]
    float32. What pairs without an expert get is left open."""
    hidden = hidden_values(x, choices, dealt, each, gate_up, limit=limit, rounds=rounds)
    order, *tiles = dealt
    width, columns, fast = x.shape[1], down.shape[2], x.is_cuda
    parts = torch.empty(len(order), width, dtype=torch.float32, device=x.device)
    sizes = launch_sizes("experts_down", x, rows=len(order), shape=each)
    down_kernel[(triton.cdiv(width, sizes["COLUMNS"]), tiles[0].shape[0])](
        hidden,
        order,
        *tiles,
        down,
        weights.contiguous(),
        parts,
        width,
        WIDTH=columns,
        EXPERTS=gate_up.shape[0],
        ROWS=each,
        FAST=fast,
        **sizes,
    )
    return parts


def hidden_values(
    x: Tensor,
    choices: int,
    dealt: tuple[Tensor, Tensor, Tensor, Tensor],
    each: int,
    gate_up: Tensor,
    *,
    limit: float,
    rounds: bool,
) -> Tensor:
    """x [rows, D] rounded, pair i of row i // choices, gate_up [experts, 2 · M, D] -> silu(min(gate, limit)) ·
    clamp(up, ±limit) [pairs, M], pairs in the order of their experts, in tiles of `each`."""
    order, *tiles = dealt
    width, columns, fast = x.shape[1], gate_up.shape[1] // 2, x.is_cuda
    hidden = torch.empty(len(order), columns, dtype=x.dtype, device=x.device)
    sizes = launch_sizes("experts_gate_up", x, rows=len(order), shape=each)
    gate_up_kernel[(triton.cdiv(columns, sizes["COLUMNS"]), tiles[0].shape[0])](
        x,
        order,
        *tiles,
        gate_up,
        hidden,
        limit,
        columns,
        choices,
        WIDTH=width,
        EXPERTS=gate_up.shape[0],
        ROWS=each,
        ROUND=rounds,
        FAST=fast,
        **sizes,
    )
    return hidden


def _sum_choices(parts: Tensor, choices: int) -> Tensor:
    """parts [rows · choices, D] -> [rows, D], summed in the order of the choices."""
    rows, width = len(parts) // choices, parts.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=parts.device)
    if rows:
        grid = (rows, triton.cdiv(width, 1024))
        sum_choices_kernel[grid](parts, out, width, CHOICES=choices, BLOCK=1024, num_warps=4)
    return out


def dense_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, input_format: PackedFormat | None
) -> Tensor:
    """As `whalepod.kernels.experts.dense_expert`, for bfloat16 on a GPU."""
    gates = linear(x if input_format is None else fp8_block32_round_trip(x), gate_up, out_dtype=x.dtype)
    return linear(swiglu(gates, limit=limit, round_trip=input_format is not None), down, out_dtype=x.dtype)


def swiglu(gates: Tensor, *, limit: float, round_trip: bool) -> Tensor:
    """gates [rows, 2 · columns] -> silu(min(gate, limit)) · clamp(up, ±limit) [rows, columns], and its round trip."""
    rows, columns = gates.shape[0], gates.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gates.dtype, device=gates.device)
    sizes = launch_sizes("swiglu", gates, rows=rows, shape=columns)
    grid = (triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(columns, sizes["COLUMNS"]))
    early = comes_early(gates, grid[0] * grid[1])
    if rows:
        swiglu_kernel[grid](
            gates,
            out,
            limit,
            rows,
            columns,
            ROUND=round_trip,
            EARLY=early,
            launch_pdl=early,
            **sizes,
        )
    return out
