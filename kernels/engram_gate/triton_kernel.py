"""Gate and injection of remembered n-grams in one pass, in Triton: a program takes one stream of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import begin_early, chunk_of, comes_early

from .reference import MAGNITUDE_MIN as MAGNITUDE_MIN_VALUE

MAGNITUDE_MIN = tl.constexpr(MAGNITUDE_MIN_VALUE)


@triton.jit
def let_in_kernel(
    streams,
    projected,
    weight,
    text,
    out,
    eps,
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One stream of one row, held as CHUNKS tensors of CHUNK channels: a row need not be a power of two wide."""
    # Streams of a row come together, so that they find its value in the cache.
    stream = tl.program_id(0) % S
    row = (tl.program_id(0) // S).to(tl.int64)
    memory = projected + row * (S + 1) * WIDTH
    place = (row * S + stream) * WIDTH
    weights = ()
    owns = ()
    values = ()
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        weights = weights + (tl.load(weight + stream * WIDTH + channel, mask=channel < WIDTH, other=0.0),)  # noqa: RUF005
    begin_early(EARLY)
    own_squares = tl.zeros((CHUNK,), tl.float32)
    key_squares = tl.zeros((CHUNK,), tl.float32)
    products = tl.zeros((CHUNK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        there = channel < WIDTH
        owns = owns + (tl.load(streams + place + channel, mask=there, other=0.0),)  # noqa: RUF005
        values = values + (tl.load(memory + S * WIDTH + channel, mask=there, other=0.0),)  # noqa: RUF005
        own = owns[chunk].to(tl.float32)
        key = tl.load(memory + stream * WIDTH + channel, mask=there, other=0.0).to(tl.float32)
        both = weights[chunk].to(tl.float32)
        own_squares += own * own
        key_squares += key * key
        products += own * both * key
    norms = 1.0 / tl.sqrt(tl.sum(own_squares, 0) / WIDTH + eps) / tl.sqrt(tl.sum(key_squares, 0) / WIDTH + eps)
    dot = tl.sum(products, 0) * norms * WIDTH**-0.5
    root = tl.sqrt(tl.maximum(tl.abs(dot), MAGNITUDE_MIN))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0, root, -root)))
    if MASKED:
        gate = gate * tl.load(text + row).to(tl.float32)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        value = owns[chunk].to(tl.float32) + gate * values[chunk].to(tl.float32)
        tl.store(out + place + channel, value, mask=channel < WIDTH)


def let_in(streams: Tensor, projected: Tensor, weight: Tensor, text: Tensor | None, *, eps: float) -> Tensor:
    """As `whalepod.kernels.engram_gate.let_in`, for bfloat16 on a GPU, or in Triton's interpreter."""
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    early = comes_early(streams, rows * count)
    if rows:
        let_in_kernel[(rows * count,)](
            streams.contiguous(),
            projected.contiguous(),
            weight,
            projected if text is None else text.to(torch.uint8),
            out,
            eps,
            S=count,
            WIDTH=width,
            CHUNK=chunk_of(width),
            CHUNKS=triton.cdiv(width, chunk_of(width)),
            MASKED=text is not None,
            EARLY=early,
            launch_pdl=early,
            **launch_sizes("engram_gate", streams, rows=rows, shape=width),
        )
    return out
