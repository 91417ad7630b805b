"""Attention over packed records in plain torch: turn queries, gather, decode, attend, turn back."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.attention import sink_attention
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32
from whalepod.kernels.rope import rotary_factors, rotate


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    bases: Tensor,
    positions: Tensor,
    lowest: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: int,
    window_rows: int,
    scale: float,
    entries: Tensor | None,
    chosen: Tensor | None,
) -> Tensor:
    width = queries.shape[2]
    at = positions[:, None].long() + torch.arange(1 - window_rows, 1, device=positions.device)
    valid = (at >= lowest[:, None]) & (at >= 0)
    records = window[torch.where(valid, bases[:, None] + at % ring, 0)]
    keys = FP8_BLOCK32.decode(records, width, queries.dtype).masked_fill_(~valid[:, :, None], 0)
    if entries is not None and chosen is not None:
        picked = chosen >= 0
        more = FP4_BLOCK16.decode(entries[chosen.long().clamp(min=0)], width, queries.dtype)
        keys = torch.cat((keys, more.masked_fill_(~picked[:, :, None], 0)), dim=1)
        valid = torch.cat((valid, picked), dim=1)
    own, neighbour = rotary_factors(cos, sin, width)
    looked = sink_attention(rotate(queries, own, neighbour), keys, valid, sink, scale=scale)
    return rotate(looked, own, -neighbour)
