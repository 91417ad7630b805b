"""The same in plain torch, one step after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.compressor import pool_groups
from whalepod.kernels.linear import linear
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, round_trip
from whalepod.kernels.rms_norm import rms_norm
from whalepod.kernels.rope import rotary_factors, rotate

from . import EntryRows, LatentRows, WindowRows


def write_attention_rows(
    latents: LatentRows | None, window: WindowRows | None, entries: EntryRows | None, *, eps: float
) -> Tensor | None:
    if entries is not None:
        write_entries(entries, eps=eps)
    if window is not None:
        write_window_rows(window, eps=eps)
    return None if latents is None else query_latents(latents, eps=eps)


def query_latents(given: LatentRows, *, eps: float) -> Tensor:
    latents = rms_norm(given.rows, given.norm, eps=eps)
    return latents if given.rounding is None else round_trip(latents, given.rounding)


def write_window_rows(given: WindowRows, *, eps: float) -> None:
    normed = rms_norm(given.rows, given.norm, eps=eps)
    turned = rotate(normed, *rotary_factors(given.cos, given.sin, normed.shape[1]))
    kept = given.destinations >= 0
    given.pool[given.destinations[kept].long()] = FP8_BLOCK32.encode(turned[kept])


def write_entries(given: EntryRows, *, eps: float) -> None:
    ends = (given.destinations >= 0).nonzero().flatten()
    pooled = _pool(given)[ends]
    latent = rms_norm(pooled.to(given.norm.dtype), given.norm, eps=eps)
    cos, sin, where = given.cos[ends], given.sin[ends], given.destinations[ends].long()
    given.entries[where] = FP4_BLOCK16.encode(rotate(latent, *rotary_factors(cos, sin, latent.shape[1])))
    key = rms_norm(linear(latent, given.key_weight), given.key_norm, eps=eps)
    given.keys[where] = MXFP4_BLOCK32.encode(rotate(key, *rotary_factors(cos, sin, key.shape[1])))


def _pool(given: EntryRows) -> Tensor:
    """[groups, width]; leaves the rows that the ring keeps there."""
    if given.ring is None or given.members is None or given.keeps is None:
        return given.raw
    members, keeps, own = given.members.long(), given.keeps.long(), given.members >= 0
    earlier = given.ring[(-1 - members).clamp(min=0)].to(given.raw.dtype)
    groups = torch.where(own[:, :, None], given.raw[members.clamp(min=0)], earlier).unflatten(2, (2, -1))
    for rows, places, theirs in ((members, keeps, own), (keeps, -1 - members, ~own)):
        kept = theirs & (keeps >= 0)
        given.ring[places[kept]] = given.raw[rows[kept]].to(given.ring.dtype)
    return pool_groups(groups[:, :, 0], groups[:, :, 1])
