"""From projected rows to window records in Triton: normalise, turn, quantise, write."""

from __future__ import annotations

import triton
import triton.language as tl

from whalepod.kernels.packing_kernel import begin_early, e4m3_bytes, power_of_two, power_of_two_exponent, rounded

WINDOW_GROUP = tl.constexpr(32)
WINDOW_TARGET_MIN = tl.constexpr(1e-4 / 448.0)


@triton.jit
def angle_pair(table, row, there, START: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr):
    """Of a table [rows, PAIRS] the numbers of a chunk's pairs [ROWS, CHUNK / 2]; its first pair is START pairs behind
    the first that turns. REST where no pair turns. row, there [ROWS, 1]."""
    pair = START + tl.arange(0, CHUNK // 2)[None, :]
    return tl.load(table + row * PAIRS + pair, mask=there & (pair >= 0), other=REST)


@triton.jit
def turned(value, c, s, ROWS: tl.constexpr, CHUNK: tl.constexpr, dtype):
    """value [ROWS, CHUNK], c and s [ROWS, CHUNK / 2] -> pairs of channels turned by their angles, rounded."""
    even, odd = tl.split(value.reshape(ROWS, CHUNK // 2, 2))
    return tl.join(rounded(even * c - odd * s, dtype), rounded(odd * c + even * s, dtype)).reshape(ROWS, CHUNK)


@triton.jit
def window_part(
    program,
    rows,
    weight,
    cos,
    sin,
    destinations,
    pool,
    count,
    eps,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows, held as tensors of CHUNK channels; only those that hold turning channels are turned."""
    CHUNKS: tl.constexpr = WIDTH // CHUNK
    STILL: tl.constexpr = WIDTH - 2 * PAIRS
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < count
    channel = tl.arange(0, CHUNK)[None, :]
    every = tl.broadcast_to(channel, (ROWS, CHUNK))  # Loaded as rows are: nothing is handed from thread to thread.
    weights = ()
    for chunk in tl.static_range(CHUNKS):
        weights = weights + (tl.load(weight + chunk * CHUNK + every),)  # noqa: RUF005
    angles = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * CHUNK > STILL:
            c = angle_pair(cos, row, inside, (chunk * CHUNK - STILL) // 2, PAIRS, CHUNK, 1.0)
            s = angle_pair(sin, row, inside, (chunk * CHUNK - STILL) // 2, PAIRS, CHUNK, 0.0)
            angles = angles + ((c, s),)  # noqa: RUF005
    target = tl.load(destinations + row, mask=inside, other=-1)
    there = target >= 0
    begin_early(EARLY)
    dtype = rows.dtype.element_ty
    values = ()
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        value = tl.load(rows + row.to(tl.int64) * STRIDE + chunk * CHUNK + channel, mask=inside, other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
        values = values + (value,)  # noqa: RUF005
    root = (1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps))[:, None]
    record = pool + target.to(tl.int64) * (WIDTH + WIDTH // WINDOW_GROUP)
    for chunk in tl.static_range(CHUNKS):
        # Rounded to the rows' dtype after the norm and after the turn, as one step after the other does.
        value = rounded(values[chunk].to(tl.float32) * root * weights[chunk].to(tl.float32), dtype)
        if (chunk + 1) * CHUNK > STILL:
            c, s = angles[chunk - STILL // CHUNK]
            value = turned(value, c, s, ROWS, CHUNK, dtype)
        grouped = value.reshape(ROWS, CHUNK // WINDOW_GROUP, WINDOW_GROUP)
        exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 2) / 448.0, WINDOW_TARGET_MIN))
        scaled = (grouped * power_of_two(254 - exponent)[:, :, None]).reshape(ROWS, CHUNK)
        tl.store(record + chunk * CHUNK + channel, e4m3_bytes(scaled), mask=there)
        group = chunk * (CHUNK // WINDOW_GROUP) + tl.arange(0, CHUNK // WINDOW_GROUP)[None, :]
        tl.store(record + WIDTH + group, exponent.to(tl.uint8), mask=there)
