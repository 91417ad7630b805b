"""Normalisation of whole rows in one pass, in Triton, alone or with the FP8 codes that a quantised matrix takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes
from whalepod.kernels.packing_kernel import (
    begin_early,
    chunk_of,
    comes_early,
    e4m3_bytes,
    narrowed,
    power_of_two,
    power_of_two_exponent,
    rounded,
)

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(1e-4 / 448.0)


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    codes,
    scales,
    eps,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row, held as CHUNKS tensors of CHUNK channels: a row need not be a power of two wide."""
    row = tl.program_id(0).to(tl.int64)
    values = ()
    weights = ()
    squares = tl.zeros((CHUNK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        weights = weights + (tl.load(weight + channel, mask=channel < WIDTH, other=0.0),)  # noqa: RUF005
    begin_early(EARLY)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + row * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
        values = values + (value,)  # noqa: RUF005
    root = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * CHUNK + tl.arange(0, CHUNK)
        there = channel < WIDTH
        value = values[chunk].to(tl.float32) * root * weights[chunk].to(tl.float32)
        if not QUANTISE:
            tl.store(out + row * WIDTH + channel, narrowed(value, x.dtype.element_ty), mask=there)
        else:
            value = rounded(value, x.dtype.element_ty)
            tl.store(out + row * WIDTH + channel, value, mask=there)
            grouped = value.reshape(CHUNK // GROUP, GROUP)
            exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 1) / 448.0, TARGET_MIN))
            grouped = grouped * power_of_two(254 - exponent)[:, None]
            tl.store(codes + row * WIDTH + channel, e4m3_bytes(grouped.reshape(CHUNK)), mask=there)
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            tl.store(scales + row * (WIDTH // GROUP) + group, exponent.to(tl.uint8), mask=group < WIDTH // GROUP)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `whalepod.kernels.rms_norm.rms_norm`, for bfloat16 or float32 on a GPU, or in Triton's interpreter."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, weight, out, None, eps)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `whalepod.kernels.rms_norm.rms_norm_fp8`."""
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], width // 32, dtype=torch.uint8, device=x.device)
    _launch(x, weight, out, (codes, scales), eps)
    return out, codes, scales


def _launch(x: Tensor, weight: Tensor, out: Tensor, records: tuple[Tensor, Tensor] | None, eps: float) -> None:
    width = x.shape[-1]
    rows, chunk = x.numel() // width, chunk_of(width)
    codes, scales = (out, out) if records is None else records
    early = comes_early(x, rows)
    sizes = launch_sizes("rms_norm" if records is None else "rms_norm_fp8", x, rows=rows, shape=width)
    if rows:
        rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            codes,
            scales,
            eps,
            WIDTH=width,
            CHUNK=chunk,
            CHUNKS=triton.cdiv(width, chunk),
            QUANTISE=records is not None,
            EARLY=early,
            launch_pdl=early,
            **sizes,
        )
