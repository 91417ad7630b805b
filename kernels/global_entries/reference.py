"""Entries and index keys in plain torch, one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.compressor import pool_groups
from whalepod.kernels.linear import linear
from whalepod.kernels.quantise import FP4_BLOCK16, MXFP4_BLOCK32
from whalepod.kernels.rms_norm import rms_norm
from whalepod.kernels.rope import rotary_factors, rotate


def write_global_entries(
    raw: Tensor,
    ring: Tensor | None,
    earlier: Tensor | None,
    norm: Tensor,
    key_weight: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    destinations: Tensor,
    entries: Tensor,
    keys: Tensor,
    *,
    eps: float,
) -> None:
    ends = (destinations >= 0).nonzero().flatten()
    pooled = raw[ends]
    if ring is not None and earlier is not None:
        others = earlier[ends].long()
        members = torch.where(
            (others >= 0)[:, :, None], raw[others.clamp(min=0)], ring[(-1 - others).clamp(min=0)].to(raw.dtype)
        )
        groups = torch.cat((members, pooled[:, None]), dim=1).unflatten(2, (2, -1))
        pooled = pool_groups(groups[:, :, 0], groups[:, :, 1])
    latent = rms_norm(pooled.to(key_weight.dtype), norm, eps=eps)
    cos, sin, where = cos[ends], sin[ends], destinations[ends].long()
    entries[where] = FP4_BLOCK16.encode(rotate(latent, *rotary_factors(cos, sin, latent.shape[1])))
    key = rms_norm(linear(latent, key_weight), key_norm, eps=eps)
    keys[where] = MXFP4_BLOCK32.encode(rotate(key, *rotary_factors(cos, sin, key.shape[1])))


def keep_raw_rows(raw: Tensor, places: Tensor, ring: Tensor) -> None:
    kept = places >= 0
    ring[places[kept].long()] = raw[kept].to(ring.dtype)
