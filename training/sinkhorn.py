"""Sinkhorn normalisation with a gradient that costs little memory.

Each of the 2 · iterations - 1 normalisations divides by sums that are kept; the way back multiplies by them again, so
no matrix in between is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, *, eps: float, iterations: int) -> Tensor:
    """logits [rows, S, S], at least float32 -> softmax over the last axis, + eps, then `iterations` normalisations of
    each axis in turn, the first axis first, without the first of the last axis. Every denominator has + eps."""
    result = _Sinkhorn.apply(logits, eps, iterations)
    assert isinstance(result, Tensor)
    return result


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, eps: float, iterations: int) -> Tensor:  # noqa: ANN401  torch's own
        if logits.is_cuda:
            from . import sinkhorn_kernel  # noqa: PLC0415  imported where its library is

            comb, sums = sinkhorn_kernel.forward(logits, eps=eps, iterations=iterations)
        else:
            comb, sums = normalise(logits, eps=eps, iterations=iterations)
        ctx.save_for_backward(comb, sums)
        ctx.eps = eps
        return comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401  torch's own
        comb, sums = ctx.saved_tensors
        if comb.is_cuda:
            from . import sinkhorn_kernel  # noqa: PLC0415  imported where its library is

            return sinkhorn_kernel.backward(comb, sums, grads[0].contiguous(), eps=ctx.eps), None, None
        return go_back(comb, sums, grads[0], eps=ctx.eps), None, None


def normalise(logits: Tensor, *, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    """-> comb [rows, S, S] and the denominators [steps, rows, S] in the order in which they were divided by."""
    comb = torch.softmax(logits, dim=-1) + eps
    sums: list[Tensor] = []
    for iteration in range(iterations):
        for axis in (1, 2)[:1] if iteration == 0 else (2, 1):
            total = comb.sum(dim=axis) + eps
            comb = comb / total.unsqueeze(axis)
            sums.append(total)
    return comb, torch.stack(sums)


def go_back(comb: Tensor, sums: Tensor, grad: Tensor, *, eps: float) -> Tensor:
    """The gradient of the logits from that of `comb`."""
    for step in range(len(sums) - 1, -1, -1):
        axis = 1 if step % 2 == 0 else 2
        total = sums[step].unsqueeze(axis)
        grad = (grad - (grad * comb).sum(dim=axis, keepdim=True)) / total
        comb = comb * total
    shares = comb - eps
    return shares * (grad - (grad * shares).sum(dim=2, keepdim=True))
