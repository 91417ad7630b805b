"""Choice of experts in one pass over a row's scores, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import SUM_MIN as SUM_MIN_VALUE

SUM_MIN = tl.constexpr(SUM_MIN_VALUE)


@triton.jit
def choose_kernel(
    logits,
    bias,
    bias_stride,
    ids,
    weights,
    factor,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """WIDE, SLOTS: powers of two from EXPERTS and CHOSEN on."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDE)
    there = expert < EXPERTS
    logit = tl.load(logits + row * EXPERTS + expert, mask=there, other=0.0)
    score = tl.sqrt(tl.log(1.0 + tl.exp(-tl.abs(logit))) + tl.maximum(logit, 0.0))
    rank = tl.load(bias + row * bias_stride + expert, mask=there, other=0.0) + score
    rank = tl.where(there, rank, float("-inf"))
    slot = tl.arange(0, SLOTS)
    picked = tl.zeros((SLOTS,), tl.int32)
    chosen = tl.zeros((SLOTS,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        best = tl.max(rank, 0)
        first = tl.min(tl.where(rank == best, expert, WIDE), 0)
        mine = tl.sum(tl.where(expert == first, score, 0.0), 0)
        picked = tl.where(slot == choice, first, picked)
        chosen = tl.where(slot == choice, mine, chosen)
        rank = tl.where(expert == first, float("-inf"), rank)
    if CHOSEN > 1:
        chosen = chosen / (tl.sum(chosen, 0) + SUM_MIN)
    tl.store(ids + row * CHOSEN + slot, picked.to(tl.int64), mask=slot < CHOSEN)
    tl.store(weights + row * CHOSEN + slot, chosen * factor, mask=slot < CHOSEN)


def choose(logits: Tensor, bias: Tensor, *, chosen: int, factor: float) -> tuple[Tensor, Tensor]:
    """logits [rows, experts] float32, bias [experts] or [rows, experts] float32 -> ids [rows, chosen] int64, weights
    [rows, chosen] float32, as `whalepod.kernels.router.route` gives them."""
    rows, experts = logits.shape
    ids = torch.empty(rows, chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=logits.device)
    if rows:
        choose_kernel[(rows,)](
            logits.contiguous(),
            bias.contiguous(),
            0 if bias.ndim == 1 else experts,
            ids,
            weights,
            factor,
            EXPERTS=experts,
            WIDE=triton.next_power_of_2(experts),
            CHOSEN=chosen,
            SLOTS=triton.next_power_of_2(chosen),
            num_warps=2,
        )
    return ids, weights
