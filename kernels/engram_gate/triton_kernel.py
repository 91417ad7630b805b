"""Gate and injection of remembered n-grams in one pass, in Triton: a program takes one stream of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    width,
    S: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    channel = tl.arange(0, WIDE)
    there = channel < width
    own = tl.load(streams + (row * S + stream) * width + channel, mask=there, other=0.0).to(tl.float32)
    memory = projected + row * (S + 1) * width
    key = tl.load(memory + stream * width + channel, mask=there, other=0.0).to(tl.float32)
    both = tl.load(weight + stream * width + channel, mask=there, other=0.0).to(tl.float32)
    norms = 1.0 / tl.sqrt(tl.sum(own * own, 0) / width + eps) / tl.sqrt(tl.sum(key * key, 0) / width + eps)
    dot = tl.sum(own * both * key, 0) * norms / tl.sqrt(width.to(tl.float32))
    root = tl.sqrt(tl.maximum(tl.abs(dot), MAGNITUDE_MIN))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0, root, -root)))
    if MASKED:
        gate = gate * tl.load(text + row).to(tl.float32)
    value = tl.load(memory + S * width + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + (row * S + stream) * width + channel, own + gate * value, mask=there)


def let_in(streams: Tensor, projected: Tensor, weight: Tensor, text: Tensor | None, *, eps: float) -> Tensor:
    """As `whalepod.kernels.engram_gate.let_in`, for bfloat16 on a GPU, or in Triton's interpreter."""
    rows, count, width = streams.shape
    out = torch.empty_like(streams)
    if rows:
        let_in_kernel[(rows, count)](
            streams.contiguous(),
            projected.contiguous(),
            weight,
            projected if text is None else text.to(torch.uint8),
            out,
            eps,
            width,
            S=count,
            WIDE=triton.next_power_of_2(width),
            MASKED=text is not None,
            num_warps=4 if width <= 2048 else 8,
        )
    return out
