"""Entries of global KV in Triton: members of a group are pooled, normalised, turned and packed. What index keys are
made of, latents before their turn, is left for `key_kernel.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from whalepod.kernels.packing_kernel import (
    ON_CHIP,
    begin_early,
    e2m1_pairs,
    e4m3_bytes,
    e4m3_values,
    reciprocal,
    rounded,
)

from .window_kernel import angle_pair, turned

ENTRY_GROUP = tl.constexpr(16)
ENTRY_TARGET_MIN = tl.constexpr(2.0**-9)


@triton.jit
def _exponential(x):
    """e^x of a number that is not above 0, within 1e-6 of it."""
    if ON_CHIP:
        return tl.inline_asm_elementwise(
            "mul.f32 $0, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, $0;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(x)


@triton.jit
def _member(raw, ring, source, inside, start, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BACK: tl.constexpr):
    """A chunk of a member's values and gate scores [GROUPS, CHUNK], from rows of this forward (source >= 0), or where
    there is BACK to look, from the ring."""
    place = tl.where(source >= 0, source, -1 - source)
    at = place.to(tl.int64) * (2 * WIDTH) + start + tl.arange(0, CHUNK)[None, :]
    own = inside & (source >= 0)
    value, score = tl.load(raw + at, mask=own, other=0.0), tl.load(raw + at + WIDTH, mask=own, other=0.0)
    if BACK:
        earlier = inside & (source < 0)
        value = tl.where(own, value, tl.load(ring + at, mask=earlier, other=0.0))
        score = tl.where(own, score, tl.load(ring + at + WIDTH, mask=earlier, other=0.0))
    return value, score


@triton.jit
def _pooled(raw, ring, sources, group, inside, start, WIDTH: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of the groups [GROUPS, CHUNK] float32: channel by channel, values weighted by the softmax of scores."""
    if RATIO == 1:
        return tl.load(raw + group.to(tl.int64) * WIDTH + start + tl.arange(0, CHUNK)[None, :], mask=inside, other=0.0)
    else:
        rows = ()
        for member in tl.static_range(RATIO):
            row = _member(raw, ring, sources[member], inside, start, WIDTH, CHUNK, member + 1 < RATIO)
            rows = rows + (row,)  # noqa: RUF005
        highest = rows[0][1]
        for member in tl.static_range(1, RATIO):
            highest = tl.maximum(highest, rows[member][1])
        total = tl.zeros(highest.shape, tl.float32)
        value = tl.zeros(highest.shape, tl.float32)
        for member in tl.static_range(RATIO):
            weight = _exponential(rows[member][1] - highest)
            total += weight
            value += weight * rows[member][0]
        return value * reciprocal(total)


@triton.jit
def _keep(raw, ring, source, keep, WIDTH: tl.constexpr):
    """A member's row, or the one that comes to its place, goes to the ring."""
    if tl.max(keep) >= 0:
        row = tl.where(source >= 0, source, keep).to(tl.int64) * (2 * WIDTH)
        place = tl.where(source >= 0, keep, -1 - source).to(tl.int64) * (2 * WIDTH)
        channel = tl.arange(0, 2 * WIDTH)[None, :]
        tl.store(ring + place + channel, tl.load(raw + row + channel, mask=keep >= 0), mask=keep >= 0)


@triton.jit
def _store_entry(record, value, start, there, GROUPS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk [GROUPS, CHUNK] of `FP4_BLOCK16` records."""
    BLOCKS: tl.constexpr = CHUNK // ENTRY_GROUP
    grouped = value.reshape(GROUPS, BLOCKS, ENTRY_GROUP)
    target = tl.maximum(tl.max(tl.abs(grouped), 2) / 6.0, ENTRY_TARGET_MIN)
    codes = e4m3_bytes(tl.minimum(target, 448.0))
    scale = e4m3_values(codes.to(tl.int32))[:, :, None]
    scaled = grouped * (1.0 / scale) if ON_CHIP else grouped / scale
    store_codes(record + start // 2, scaled.reshape(GROUPS, CHUNK), there, GROUPS, CHUNK)
    block = start // ENTRY_GROUP + tl.arange(0, BLOCKS)[None, :]
    tl.store(record + WIDTH // 2 + block, codes, mask=there)


@triton.jit
def store_codes(record, scaled, there, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """E2M1 codes of `scaled` [ROWS, CHUNK], two a byte."""
    even, odd = tl.split(scaled.reshape(ROWS, CHUNK // 2, 2))
    tl.store(record + tl.arange(0, CHUNK // 2)[None, :], e2m1_pairs(even, odd).to(tl.uint8), mask=there)


@triton.jit
def entry_part(
    program,
    raw,
    ring,
    members,
    keeps,
    norm,
    cos,
    sin,
    destinations,
    latents,
    arrivals,
    entries,
    count,
    eps,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    RATIO: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """GROUPS groups, held as tensors of CHUNK channels; only those that hold turning channels are turned. Leaves their
    latents and a count of 0 for `index_keys_kernel`."""
    CHUNKS: tl.constexpr = WIDTH // CHUNK
    STILL: tl.constexpr = WIDTH - 2 * PAIRS
    group = (program * GROUPS + tl.arange(0, GROUPS))[:, None]
    inside = group < count
    channel = tl.arange(0, CHUNK)[None, :]
    every = tl.broadcast_to(channel, (GROUPS, CHUNK))
    weights = ()
    angles = ()
    for chunk in tl.static_range(CHUNKS):
        weights = weights + (tl.load(norm + chunk * CHUNK + every),)  # noqa: RUF005
        if (chunk + 1) * CHUNK > STILL:
            c = angle_pair(cos, group, inside, (chunk * CHUNK - STILL) // 2, PAIRS, CHUNK, 1.0)
            s = angle_pair(sin, group, inside, (chunk * CHUNK - STILL) // 2, PAIRS, CHUNK, 0.0)
            angles = angles + ((c, s),)  # noqa: RUF005
    destination = tl.load(destinations + group, mask=inside, other=-1)
    sources = ()
    kept = ()
    if RATIO > 1:
        for member in tl.static_range(RATIO):
            sources = sources + (tl.load(members + group * RATIO + member, mask=inside, other=0),)  # noqa: RUF005
            kept = kept + (tl.load(keeps + group * RATIO + member, mask=inside, other=-1),)  # noqa: RUF005
    begin_early(EARLY)
    tl.store(arrivals + program, 0)
    dtype = norm.dtype.element_ty
    values = ()
    squares = tl.zeros((GROUPS, CHUNK), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value = _pooled(raw, ring, sources, group, inside, chunk * CHUNK, WIDTH, RATIO, CHUNK)
        value = rounded(value, dtype)
        squares += value * value
        values = values + (value,)  # noqa: RUF005
    if RATIO > 1:
        tl.debug_barrier()  # Rows may take places in the ring that these groups were read from.
        for member in tl.static_range(RATIO):
            _keep(raw, ring, sources[member], kept[member], WIDTH)
    root = (1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps))[:, None]
    there = destination >= 0
    record = entries + destination.to(tl.int64) * (WIDTH // 2 + WIDTH // ENTRY_GROUP)
    for chunk in tl.static_range(CHUNKS):
        value = rounded(values[chunk] * root * weights[chunk].to(tl.float32), dtype)
        tl.store(latents + group.to(tl.int64) * WIDTH + chunk * CHUNK + channel, value, mask=there)
        if (chunk + 1) * CHUNK > STILL:
            c, s = angles[chunk - STILL // CHUNK]
            value = turned(value, c, s, GROUPS, CHUNK, dtype)
        _store_entry(record, value, chunk * CHUNK, there, GROUPS, WIDTH, CHUNK)
