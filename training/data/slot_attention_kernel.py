"""Attention of one new row per slot over that slot's own keys, for the small model that writes the corpus (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERY_ROWS = 16
"""Rows of the smallest matrix product; a group of query heads fills the first ones."""
BLOCK_ROWS = 64


@triton.jit
def _slot_attention(
    q_ptr, k_ptr, v_ptr, position_ptr, out_ptr, rows, q_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    slot = (pid // KV_HEADS).to(tl.int64)
    head = pid % KV_HEADS
    count = tl.load(position_ptr + slot) + 1
    r = tl.arange(0, QUERIES)
    d = tl.arange(0, WIDTH)
    grouped = (r < GROUP)[:, None]
    q = tl.load(q_ptr + slot * q_stride + (head * GROUP + r)[:, None] * WIDTH + d[None, :], mask=grouped, other=0.0)
    base = (slot * KV_HEADS + head) * rows * WIDTH
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(0, count, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (j < count)[:, None]
        k = tl.load(k_ptr + base + j[:, None] * WIDTH + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + base + j[:, None] * WIDTH + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((j < count)[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp(scores - better[:, None])
        kept = tl.exp(best - better)
        total = total * kept + tl.sum(p, 1)
        out = out * kept[:, None] + tl.dot(p.to(v.dtype), v)
        best = better
    out = out / total[:, None]
    at = out_ptr + slot * (KV_HEADS * GROUP * WIDTH) + (head * GROUP + r)[:, None] * WIDTH + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=grouped)


def slot_attention(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """q [slots, heads, width], slots may lie apart; keys, values [slots, kv heads, rows, width]; positions [slots]
    int64, where each slot's newest row lies. Returns [slots, heads · width]."""
    slots, kv_heads, rows, width = keys.shape
    heads = q.shape[1]
    out = torch.empty(slots, heads * width, dtype=q.dtype, device=q.device)
    _slot_attention[(slots * kv_heads,)](
        q, keys, values, positions, out, rows, q.stride(0), width**-0.5,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, WIDTH=width, QUERIES=QUERY_ROWS, BLOCK=BLOCK_ROWS,
    )  # fmt: skip
    return out
