"""The sampling head in Triton. Nothing is sorted but a row's best CANDIDATES.

    edits    one lane an edit, in place
    masks    (row, part), in place
    draw     (row, part): weight + noise in float32, the best and the second; where these are too near to tell, again in
             float64. Then one program a row joins its parts
    kept     (row, part): over temperature, largest and float64 sum of exp; `top_entries` finds the candidates by bits;
             one program a row sorts those, finds where to end, and draws among them in float64

Sums of exp have another order than the plain version's, and logarithms other last bits: where that could decide, a row
is unsure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.top_entries.triton_kernel import top_entries

if TYPE_CHECKING:
    from . import Edits, Limits, Noise

PARTS, TILE = 16, 1024
ROUGH_ERROR = tl.constexpr(5e-5)
"""Of float32 noise, its logarithms within 2^-22 relatively or absolutely; of the sum beside it, 2^-22 of its size."""
SHARE_ERROR = tl.constexpr(6e-11)
"""Of a float64 sum of 524,288 terms in any order, as a share of it: 2^19 · 2^-53."""
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def noise_words(key, position, block):
    """The four words of counter (block, position, 0, 0)."""
    none = block * 0
    return tl.philox(key, block, none + position, none, none)


@triton.jit
def rough_gumbel(words):
    """uint32 -> float32. -log(1 - u) by its series where u is small, else of the complement."""
    u = words.to(tl.float32) * 2.0**-32 + 2.0**-33
    rest = (words ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u / 7))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(rest)))


@triton.jit
def gumbel(words):
    """uint32 -> float64. 1 - u is exact."""
    return -tl.log(-tl.log(1.0 - (words.to(tl.float64) + 0.5) * 2.0**-32))


@triton.jit
def edits_kernel(weights, stride, places, factors, edits, BLOCK: tl.constexpr):
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = edit < edits
    row = tl.load(places + edit, mask=there, other=0)
    at = weights + row * stride + tl.load(places + edits + edit, mask=there, other=0)
    penalty = tl.load(factors + edits + edit, mask=there, other=1.0)
    value = tl.load(at, mask=there, other=0.0) + tl.load(factors + edit, mask=there, other=0.0)
    value = tl.where(value > 0, tl.math.div_rn(value, penalty), value * penalty)
    tl.store(at, value - tl.load(factors + 2 * edits + edit, mask=there, other=0.0), mask=there)


@triton.jit
def masks_kernel(weights, stride, vocab, rows, words, word_stride, TILE: tl.constexpr):
    masked = tl.program_id(0)
    lane = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = lane < vocab
    word = tl.load(words + masked.to(tl.int64) * word_stride + lane // 32, mask=there, other=-1)
    forbidden = ((word >> (lane % 32)) & 1) == 0
    row = tl.load(rows + masked).to(tl.int64)
    tl.store(weights + row * stride + lane, tl.full((TILE,), NOTHING, tl.float32), mask=there & forbidden)


@triton.jit
def draw_kernel(
    weights,
    stride,
    vocab,
    temperatures,
    keys,
    positions,
    unsure,
    part_sums,
    part_ids,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """`part_sums` [2, rows, PARTS] float64: of the best and of the second; NaN where a weight is no number."""
    row, part = tl.program_id(0), tl.program_id(1)
    if WIDE:  # noqa: SIM102  the compiler would evaluate both sides of `and`
        if tl.load(unsure + row) == 0:
            return
    temperature = tl.load(temperatures + row)
    noisy = temperature > 0
    temperature = tl.where(noisy, temperature, 1.0)
    key, position = tl.load(keys + row), tl.load(positions + row).to(tl.uint32)
    dtype = tl.float64 if WIDE else tl.float32
    best = tl.full((TILE,), NOTHING, dtype)
    second = tl.full((TILE,), NOTHING, dtype)
    ids = tl.zeros((TILE,), tl.int32)
    broken = tl.zeros((TILE,), tl.int32)
    for tile in range(TILES):
        start = (part * TILES + tile) * TILE
        lane = start + tl.arange(0, TILE)
        value = tl.load(weights + row.to(tl.int64) * stride + lane, mask=lane < vocab, other=NOTHING)
        broken |= (value != value).to(tl.int32)
        value = tl.math.div_rn(value, temperature).to(dtype)
        if noisy:
            w0, w1, w2, w3 = noise_words(key, position, start // 4 + tl.arange(0, TILE // 4))
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            value += gumbel(words) if WIDE else rough_gumbel(words)
        better = value > best
        second = tl.maximum(second, tl.where(better, best, value))
        ids = tl.where(better, lane, ids)
        best = tl.where(better, value, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, ids, 2147483647), 0)
    runner_up = tl.max(tl.maximum(second, tl.where((best == top) & (ids == first), NOTHING, best)), 0)
    top = tl.where(tl.sum(broken, 0) > 0, float("nan"), top.to(tl.float64))
    at = row * PARTS + part
    tl.store(part_sums + at, top)
    tl.store(part_sums + tl.num_programs(0) * PARTS + at, runner_up.to(tl.float64))
    tl.store(part_ids + at, first)


@triton.jit
def join_kernel(temperatures, unsure, part_sums, part_ids, ids, WIDE: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:  # noqa: SIM102  the compiler would evaluate both sides of `and`
        if tl.load(unsure + row) == 0:
            return
    at = row * PARTS + tl.arange(0, PARTS)
    best = tl.load(part_sums + at)
    whole = tl.sum((best != best).to(tl.int32), 0) == 0
    token = tl.load(part_ids + at)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, token, 2147483647), 0)
    second = tl.load(part_sums + tl.num_programs(0) * PARTS + at)
    second = tl.max(tl.maximum(second, tl.where(token == first, NOTHING, best)), 0)
    whole = whole & (tl.abs(top) < float("inf"))
    told = (top - second > _doubt(top, WIDE)) | (tl.load(temperatures + row) == 0)
    tl.store(ids + row, tl.where(whole, first, 0).to(tl.int64))
    tl.store(unsure + row, tl.where(whole & told, 0, 1).to(tl.int8))


@triton.jit
def _doubt(top, WIDE: tl.constexpr):
    """Two sums that differ by no more may have changed places."""
    if WIDE:
        return tl.abs(top) * 2.0**-50 + 1e-12
    else:
        return (tl.abs(top) * 2.0**-22 + ROUGH_ERROR) * 2


@triton.jit
def masses_kernel(
    weights,
    stride,
    vocab,
    temperatures,
    maxima,
    masses,
    DIVIDE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """`maxima` [rows, PARTS] float32, NaN where a weight is no number; `masses` [rows, PARTS] float64: Σ exp."""
    row, part = tl.program_id(0), tl.program_id(1)
    base = weights + row.to(tl.int64) * stride
    best = tl.full((TILE,), NOTHING, tl.float32)
    broken = tl.zeros((TILE,), tl.int32)
    for tile in range(TILES):
        lane = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        value = tl.load(base + lane, mask=lane < vocab, other=NOTHING)
        broken |= (value != value).to(tl.int32)
        if DIVIDE:
            value = tl.math.div_rn(value, tl.load(temperatures + row))
            tl.store(base + lane, value, mask=lane < vocab)
        best = tl.maximum(best, value)
    top = tl.max(best, 0)
    peak = tl.where(top > NOTHING, top, 0.0)
    mass = tl.zeros((TILE,), tl.float64)
    tl.debug_barrier()
    for tile in range(TILES):
        lane = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        value = tl.load(base + lane, mask=lane < vocab, other=NOTHING)
        mass += tl.exp(value.to(tl.float64) - peak)
    at = row * PARTS + part
    tl.store(maxima + at, tl.where(tl.sum(broken, 0) > 0, float("nan"), top))
    tl.store(masses + at, tl.sum(mass, 0))


@triton.jit
def _ordered(values):
    """float32 -> int32 of the same order; both zeros are one. Its own inverse on what it gives."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose_kernel(
    weights,
    stride,
    vocab,
    candidates,
    maxima,
    masses,
    keys,
    positions,
    top_k,
    top_p,
    log_min_p,
    ids,
    unsure,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.arange(0, COUNT)
    token = tl.load(candidates + row.to(tl.int64) * COUNT + slot)
    there = token >= 0
    value = tl.load(weights + row.to(tl.int64) * stride + token, mask=there, other=NOTHING)
    rank = (~_ordered(value)).to(tl.int64) * 4294967296 + token
    rank = tl.sort(tl.where(there, rank, 0x7FFFFFFFFFFFFFFF))
    number = tl.sum(there.to(tl.int32), 0)
    there = slot < number
    token = tl.where(there, (rank & 0x7FFFFFFF).to(tl.int32), 0)
    order = ~(rank >> 32).to(tl.int32)
    value = tl.where(there, (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True), NOTHING)

    parts = row * PARTS + tl.arange(0, PARTS)
    maximum = tl.load(maxima + parts)
    whole = tl.sum((maximum != maximum).to(tl.int32), 0) == 0
    peak = tl.max(value, 0)
    whole = whole & (tl.abs(peak) < float("inf"))
    peak = tl.where(whole, peak, 0.0)
    share = tl.cumsum(tl.exp(value.to(tl.float64) - peak), 0)
    most = tl.load(top_k + row).to(tl.int32)
    total = tl.sum(tl.load(masses + parts) * tl.exp(maximum.to(tl.float64) - peak), 0)
    total = tl.where(most < vocab, tl.sum(tl.where(slot == most - 1, share, 0.0), 0), total)
    portion = tl.load(top_p + row)
    wanted = portion * total
    near = tl.sum((there & (tl.abs(share - wanted) <= total * SHARE_ERROR)).to(tl.int32), 0)
    reaching = tl.sum((there & (share < wanted)).to(tl.int32), 0) + 1
    whole = whole & ((portion >= 1) | (near == 0))
    likely = tl.sum((there & (value >= peak + tl.load(log_min_p + row))).to(tl.int32), 0)
    count = tl.where(portion < 1, tl.minimum(most, reaching), most)
    count = tl.minimum(count, tl.where(likely == number, vocab, likely))
    whole = whole & (count <= number) & ((most <= number) | (most == vocab))

    block = (token // 4).to(tl.uint32)
    w0, w1, w2, w3 = noise_words(tl.load(keys + row), tl.load(positions + row).to(tl.uint32), block)
    place = token % 4
    word = tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
    total_sum = tl.where(slot < count, value.to(tl.float64) + gumbel(word), NOTHING)
    top = tl.max(total_sum, 0)
    first = tl.min(tl.where(total_sum == top, token, 2147483647), 0)
    second = tl.max(tl.where((total_sum == top) & (token == first), NOTHING, total_sum), 0)
    whole = whole & (top - second > _doubt(top, True))
    tl.store(ids + row, tl.where(whole, first, 0).to(tl.int64))
    tl.store(unsure + row, tl.where(whole, 0, 1).to(tl.int8))


def apply_edits(weights: Tensor, edits: Edits) -> None:
    """As `whalepod.kernels.sampling.apply_edits`, on a GPU, or in Triton's interpreter; so are the others."""
    count = edits.places.shape[1]
    if count:
        edits_kernel[(triton.cdiv(count, 256),)](
            weights, weights.stride(0), edits.places, edits.factors, count, BLOCK=256, enable_fp_fusion=False
        )


def apply_masks(weights: Tensor, rows: Tensor, words: Tensor) -> None:
    vocab = weights.shape[1]
    if len(rows):
        masks_kernel[(len(rows), triton.cdiv(vocab, TILE))](
            weights, weights.stride(0), vocab, rows, words, words.stride(0), TILE=TILE
        )


def draw(weights: Tensor, temperatures: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    rows, vocab = weights.shape
    device = weights.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    unsure = torch.empty(rows, dtype=torch.int8, device=device)
    if rows == 0:
        return ids, unsure.bool()
    sums = torch.empty(2, rows, PARTS, dtype=torch.float64, device=device)
    part_ids = torch.empty(rows, PARTS, dtype=torch.int32, device=device)
    for wide in (False, True):
        draw_kernel[(rows, PARTS)](
            weights,
            weights.stride(0),
            vocab,
            temperatures,
            noise.keys,
            noise.positions,
            unsure,
            sums,
            part_ids,
            WIDE=wide,
            PARTS=PARTS,
            TILE=TILE,
            TILES=triton.cdiv(vocab, PARTS * TILE),
            num_warps=4,
        )
        join_kernel[(rows,)](temperatures, unsure, sums, part_ids, ids, WIDE=wide, PARTS=PARTS, num_warps=1)
    return ids, unsure.bool()


def draw_kept(
    weights: Tensor, temperatures: Tensor, noise: Noise, limits: Limits, *, candidates: int
) -> tuple[Tensor, Tensor]:
    rows, vocab = weights.shape
    ids = torch.empty(rows, dtype=torch.int64, device=weights.device)
    unsure = torch.empty(rows, dtype=torch.int8, device=weights.device)
    if rows == 0:
        return ids, unsure.bool()
    maxima, masses = _masses(weights, temperatures)
    count = min(candidates, triton.next_power_of_2(vocab))
    visible = torch.full((rows,), vocab, dtype=torch.int32, device=weights.device)
    choose_kernel[(rows,)](
        weights,
        weights.stride(0),
        vocab,
        top_entries(weights, visible, count=count),
        maxima,
        masses,
        noise.keys,
        noise.positions,
        limits.top_k,
        limits.top_p,
        limits.log_min_p,
        ids,
        unsure,
        COUNT=count,
        PARTS=PARTS,
        num_warps=4,
    )
    return ids, unsure.bool()


def log_sums(logits: Tensor) -> Tensor:
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.float64, device=logits.device)
    maxima, masses = _masses(logits, None)
    wide = maxima.double()
    peak = wide.amax(1, keepdim=True)
    return peak[:, 0] + torch.log((masses * torch.exp(wide - peak)).sum(1))


def _masses(weights: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each part, its largest weight and Σ exp(w - largest). `temperatures`: weights are divided by them first."""
    rows, vocab = weights.shape
    maxima = torch.empty(rows, PARTS, dtype=torch.float32, device=weights.device)
    masses = torch.empty(rows, PARTS, dtype=torch.float64, device=weights.device)
    masses_kernel[(rows, PARTS)](
        weights,
        weights.stride(0),
        vocab,
        temperatures if temperatures is not None else maxima,
        maxima,
        masses,
        DIVIDE=temperatures is not None,
        PARTS=PARTS,
        TILE=TILE,
        TILES=triton.cdiv(vocab, PARTS * TILE),
        num_warps=4,
    )
    return maxima, masses
