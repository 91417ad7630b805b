"""Sinkhorn normalisation and its gradient in Triton: one program holds the matrices of some rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64


@triton.jit
def forward_kernel(logits, comb, sums, rows, eps, iterations, S: tl.constexpr, ROWS: tl.constexpr):
    """comb [rows, S, S] and the denominators [2 · iterations - 1, rows, S]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    stream = tl.arange(0, S)
    at = row[:, None, None] * S * S + stream[None, :, None] * S + stream[None, None, :]
    there = (row < rows)[:, None, None] & (stream < S)[None, :, None] & (stream < S)[None, None, :]
    sums_at = row[:, None] * S + stream[None, :]
    sums_there = (row < rows)[:, None] & (stream < S)[None, :]
    z = tl.load(logits + at, mask=there, other=0.0)
    mix = tl.exp(z - tl.max(z, 2)[:, :, None])
    mix = mix / tl.sum(mix, 2)[:, :, None] + eps
    total = tl.sum(mix, 1) + eps
    tl.store(sums + sums_at, total, mask=sums_there)
    mix = mix / total[:, None, :]
    for iteration in range(1, iterations):
        step = (2 * iteration - 1) * rows.to(tl.int64) * S
        total = tl.sum(mix, 2) + eps
        tl.store(sums + step + sums_at, total, mask=sums_there)
        mix = mix / total[:, :, None]
        total = tl.sum(mix, 1) + eps
        tl.store(sums + step + rows * S + sums_at, total, mask=sums_there)
        mix = mix / total[:, None, :]
    tl.store(comb + at, mix, mask=there)


@triton.jit
def backward_kernel(comb, sums, grads, out, rows, eps, iterations, S: tl.constexpr, ROWS: tl.constexpr):
    """The gradient of the logits [rows, S, S]: every division is undone, last first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    stream = tl.arange(0, S)
    at = row[:, None, None] * S * S + stream[None, :, None] * S + stream[None, None, :]
    there = (row < rows)[:, None, None] & (stream < S)[None, :, None] & (stream < S)[None, None, :]
    sums_at = row[:, None] * S + stream[None, :]
    sums_there = (row < rows)[:, None] & (stream < S)[None, :]
    mix = tl.load(comb + at, mask=there, other=0.0)
    grad = tl.load(grads + at, mask=there, other=0.0)
    for back in range(1, iterations):
        step = (2 * (iterations - back) - 1) * rows.to(tl.int64) * S
        total = tl.load(sums + step + rows * S + sums_at, mask=sums_there, other=1.0)
        grad = (grad - tl.sum(grad * mix, 1)[:, None, :]) / total[:, None, :]
        mix = mix * total[:, None, :]
        total = tl.load(sums + step + sums_at, mask=sums_there, other=1.0)
        grad = (grad - tl.sum(grad * mix, 2)[:, :, None]) / total[:, :, None]
        mix = mix * total[:, :, None]
    total = tl.load(sums + sums_at, mask=sums_there, other=1.0)
    grad = (grad - tl.sum(grad * mix, 1)[:, None, :]) / total[:, None, :]
    mix = mix * total[:, None, :] - eps
    grad = mix * (grad - tl.sum(grad * mix, 2)[:, :, None])
    tl.store(out + at, grad, mask=there)


def forward(logits: Tensor, *, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    """As `sinkhorn.normalise`, for float32; S a power of two."""
    rows, count, _ = logits.shape
    logits = logits.contiguous()
    comb = torch.empty_like(logits)
    sums = torch.empty(2 * iterations - 1, rows, count, dtype=torch.float32, device=logits.device)
    grid = (triton.cdiv(rows, ROWS),)
    forward_kernel[grid](logits, comb, sums, rows, eps, iterations, S=count, ROWS=ROWS, num_warps=2)
    return comb, sums


def backward(comb: Tensor, sums: Tensor, grad: Tensor, *, eps: float) -> Tensor:
    """As `sinkhorn.go_back`."""
    rows, count, _ = comb.shape
    out = torch.empty_like(comb)
    iterations = (sums.shape[0] + 1) // 2
    grid = (triton.cdiv(rows, ROWS),)
    backward_kernel[grid](comb, sums, grad, out, rows, eps, iterations, S=count, ROWS=ROWS, num_warps=2)
    return out
