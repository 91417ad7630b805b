"""Writing of global KV: a KV source pools groups of tokens into entries, and derives an index key from each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whalepod.kernels.compressor import pool_groups
from whalepod.kernels.numerics import wide_dtype
from whalepod.kernels.rms_norm import rms_norm

from .batch_plan import EntryPlan
from .config import ModelConfig
from .forward_pass import ForwardPass
from .projection import Projection, Weights
from .rotary import RotaryAngles


@dataclass(frozen=True, slots=True)
class GlobalKvWriter:
    """A KV source's compressor and its index keys."""

    layer: int
    ratio: int
    compressor: Projection
    """[head_dim, D], or with ratio > 1 [2 · head_dim, D]: values, then gate scores."""
    norm: Tensor
    index_key: Projection
    index_key_norm: Tensor
    eps: float

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, layer: int) -> Self:
        """`weights` below `layers.{layer}.attn.`."""
        ratio = config.ratio(layer)
        names = ("compressor.wkv", "compressor.wgate") if ratio > 1 else ("compressor.wkv",)
        return cls(
            layer=layer,
            ratio=ratio,
            compressor=weights.plain_projection(*names),
            norm=weights["compressor.norm.weight"],
            index_key=weights.plain_projection("indexer.wk"),
            index_key_norm=weights["indexer.k_norm.weight"],
            eps=config.rms_norm_eps,
        )

    def write(self, x: Tensor, run: ForwardPass) -> None:
        """x [rows, D], the layer's normalised input. Entries whose last token is in this forward go to the caches."""
        plan, caches = run.plan.gather.entries[self.ratio], run.caches
        raw = run.all_rows(self.compressor(x, out_dtype=wide_dtype(x.dtype)))
        pooled = raw[plan.members[:, 0]] if self.ratio == 1 else self._pool(raw, plan, caches.groups[self.layer])
        latent = rms_norm(pooled.to(x.dtype), self.norm, eps=self.eps)
        angles = RotaryAngles.at(plan.positions, run.frequencies[True])
        entries = caches.formats.global_kv.encode(angles.rotate(latent))
        caches.global_kv[self.layer].flatten(0, 1)[plan.destinations] = entries
        keys = rms_norm(self.index_key(latent), self.index_key_norm, eps=self.eps)
        records = caches.formats.index_key.encode(angles.rotate(keys))
        caches.index_keys[self.layer].flatten(0, 1)[plan.destinations] = records

    def _pool(self, raw: Tensor, plan: EntryPlan, ring: Tensor) -> Tensor:
        """raw [rows, 2 · head_dim] -> entries [entries, head_dim]; leaves the rows' raw values in the ring."""
        ring = ring.flatten(0, 1)
        own = raw.unflatten(1, (2, -1))
        groups = torch.cat((ring[plan.previous].to(raw.dtype), own))[plan.members]
        ring[plan.write_slots] = own[plan.write_rows].to(ring.dtype)
        return pool_groups(groups[:, :, 0], groups[:, :, 1])
