"""Index keys in Triton: the product of latents with the key's matrix, then norm, turn and record.

    latents of a tile of rows ─ product with a slice of the matrix ─▶ products ─ the tile's last program ─▶ records

Programs wait for the latents alone: what else they read is on its way before. One processor takes longer to read the
whole matrix than a step's rows take, so several share a tile; whichever is last finds all of its products.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import (
    begin_early,
    comes_early,
    narrowed,
    power_of_two,
    power_of_two_exponent,
    rounded,
)

from . import EntryRows
from .entry_kernel import store_codes
from .window_kernel import angle_pair, turned

KEY_GROUP = tl.constexpr(32)
KEY_TARGET_MIN = tl.constexpr(2.0**-126)


@triton.jit
def _with_product(total, a, b, FAST: tl.constexpr):
    """total + a · bᵀ"""
    if FAST:
        return tl.dot(a, tl.trans(b), total)
    else:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), total, input_precision="ieee")


@triton.jit
def _what_follows(norm, cos, sin, row, inside, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """The norm's weights and the angles of whole rows."""
    weights = tl.load(norm + tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (ROWS, WIDTH)))
    c = angle_pair(cos, row, inside, PAIRS - WIDTH // 2, PAIRS, WIDTH, 1.0)
    s = angle_pair(sin, row, inside, PAIRS - WIDTH // 2, PAIRS, WIDTH, 0.0)
    return weights, c, s


@triton.jit(do_not_specialize=["count"])
def index_keys_kernel(
    latents,
    weight,
    norm,
    cos,
    sin,
    destinations,
    products,
    arrivals,
    keys,
    count,
    eps,
    WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """arrivals: a count of 0 for each tile, at first. With STEP = LATENT all but the latents is read before those are
    there."""
    SLICES: tl.constexpr = WIDTH // COLUMNS
    tile = tl.program_id(0) // SLICES
    row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < count
    step = tl.arange(0, STEP)[None, :]
    first = tl.program_id(0) % SLICES * COLUMNS
    right = weight + (first + tl.arange(0, COLUMNS))[:, None] * LATENT + step
    AHEAD: tl.constexpr = STEP == LATENT
    if AHEAD:
        b = tl.load(right)
        weights, c, s = _what_follows(norm, cos, sin, row, inside, WIDTH, PAIRS, ROWS)
    destination = tl.load(destinations + row, mask=inside, other=-1)
    begin_early(EARLY)
    there = destination >= 0  # The latents of other rows were not written.
    left = latents + row.to(tl.int64) * LATENT + step
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    if AHEAD:
        product = _with_product(product, tl.load(left, mask=there, other=0.0), b, FAST)
    else:
        for start in range(0, LATENT, STEP):
            a = tl.load(left + start, mask=there, other=0.0)
            product = _with_product(product, a, tl.load(right + start), FAST)
    dtype = norm.dtype.element_ty
    tl.store(products + row * WIDTH + first + tl.arange(0, COLUMNS)[None, :], narrowed(product, dtype))
    tl.debug_barrier()  # Every thread has stored before one says so.
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SLICES - 1:
        if not AHEAD:
            weights, c, s = _what_follows(norm, cos, sin, row, inside, WIDTH, PAIRS, ROWS)
        channel = tl.arange(0, WIDTH)[None, :]
        value = tl.load(products + row * WIDTH + channel, cache_modifier=".cg").to(tl.float32)
        root = (1.0 / tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps))[:, None]
        value = turned(rounded(value * root * weights.to(tl.float32), dtype), c, s, ROWS, WIDTH, dtype)
        grouped = value.reshape(ROWS, WIDTH // KEY_GROUP, KEY_GROUP)
        exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 2) / 6.0, KEY_TARGET_MIN))
        scaled = (grouped * power_of_two(254 - exponent)[:, :, None]).reshape(ROWS, WIDTH)
        record = keys + destination.to(tl.int64) * (WIDTH // 2 + WIDTH // KEY_GROUP)
        store_codes(record, scaled, there, ROWS, WIDTH)
        tl.store(record + WIDTH // 2 + tl.arange(0, WIDTH // KEY_GROUP)[None, :], exponent.to(tl.uint8), mask=there)


def write_index_keys(latents: Tensor, arrivals: Tensor, given: EntryRows, *, eps: float) -> None:
    """latents [groups, width], where a group has a destination -> its index key. arrivals int32: a 0 for every 16
    groups, or more of them."""
    count, width, key_width = *latents.shape, given.key_norm.shape[0]
    sizes = launch_sizes("index_keys", latents, rows=count)
    columns = min(sizes["COLUMNS"], key_width)
    tiles = triton.cdiv(count, sizes["ROWS"])
    early = comes_early(latents, tiles * key_width // columns)
    index_keys_kernel[(tiles * key_width // columns,)](
        latents,
        given.key_weight.contiguous(),
        given.key_norm,
        given.cos,
        given.sin,
        given.destinations,
        latents.new_empty(tiles * sizes["ROWS"], key_width),
        arrivals,
        given.keys,
        count,
        eps,
        WIDTH=key_width,
        LATENT=width,
        STEP=math.gcd(width, sizes["STEP"]),
        PAIRS=given.cos.shape[1],
        ROWS=sizes["ROWS"],
        COLUMNS=columns,
        FAST=latents.is_cuda,
        EARLY=early,
        num_warps=sizes["num_warps"],
        num_stages=sizes["num_stages"],
        launch_pdl=early,
    )
