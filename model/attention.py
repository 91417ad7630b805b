"""Attention of a layer: it writes window rows (and, in a KV source, entries), then looks at its window and a selection.

x ─┬▶ RowWriter.write ──▶ window ring, global KV, index keys
   └▶ Attention ──▶ queries ──▶ window keys ∪ selected entries ──▶ output

Draft blocks look the same way, at keys of their own (`draft.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.attention import sink_attention
from whalepod.kernels.linear import grouped_linear
from whalepod.kernels.rms_norm import rms_norm

from . import packed_attention
from .batch_plan import WindowPlan
from .config import ModelConfig
from .forward_pass import ForwardPass, Selection
from .global_kv import GlobalKvWriter
from .indexer import Indexer
from .projection import Projection, Weights
from .rotary import RotaryAngles


@dataclass(frozen=True, slots=True)
class RowWriter:
    """The half of a layer's attention that leaves rows in the caches."""

    layer: int
    compressed: bool
    """Whether the layer reads global KV, which decides its rotary frequencies."""
    kv: Projection
    kv_norm: Tensor
    global_kv: GlobalKvWriter | None
    eps: float
    joined: Projection | None = None
    """The query's first matrix above `kv`, where both take the same rows: then both lie in it."""

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, layer: int) -> Self:
        """`weights` below `layers.{layer}.attn.`."""
        source = layer in config.kv_source_layer_ids
        return cls(
            layer=layer,
            compressed=config.ratio(layer) > 0,
            kv=weights.projection("wkv"),
            kv_norm=weights["kv_norm.weight"],
            global_kv=GlobalKvWriter.from_weights(weights, config, layer) if source else None,
            eps=config.rms_norm_eps,
        )

    def write(self, x: Tensor, run: ForwardPass, attention: Attention | None) -> tuple[Tensor, Tensor | None]:
        """x [rows, D], the normalised input. Returns the window pool of the layer's `WindowPlan`, [pool, head_dim], or
        where records stay packed that of its `PackedWindow`, [pool, record_bytes]. There, query latents for `attention`
        come with it, if it looks from the same rows."""
        if run.plan.packed is not None:
            return packed_attention.write_rows(self, x, run, attention)
        row = rms_norm(self.kv(x), self.kv_norm, eps=self.eps)
        records = run.all_rows(run.caches.formats.window.encode(run.rotary(compressed=self.compressed).rotate(row)))
        if self.global_kv is not None:
            self.global_kv.write(x, run)
        pool = _swap_window(records, run.caches.windows[self.layer], run.window_plan(self.layer))
        return run.caches.formats.window.decode(pool, row.shape[1], row.dtype), None


def from_pool(pool: Tensor, index: Tensor) -> Selection:
    """pool [rows, head_dim] whose first row is zero, index [queries, count] -> the rows; 0 is none."""
    return Selection(functional.embedding(index, pool), index > 0)


def _swap_window(records: Tensor, ring: Tensor, plan: WindowPlan) -> Tensor:
    """records [rows, bytes] go to the ring. Returns the pool: a zero row, what the ring held before them, they."""
    ring = ring.flatten(0, 1)
    pool = torch.cat((records.new_zeros(1, records.shape[1]), ring.index_select(0, plan.previous), records))
    ring[plan.write_slots] = records.index_select(0, plan.write_rows)
    return pool


@dataclass(frozen=True, slots=True)
class Attention:
    """The half that looks."""

    layer: int
    compressed: bool
    heads: int
    output_groups: int
    query_down: Projection
    query_norm: Tensor
    query_up: Projection
    sink: Tensor
    indexer: Indexer | None
    """In index sources."""
    output_down: Tensor
    """[groups, o_lora_rank, heads a group · head_dim]"""
    output_up: Projection
    eps: float

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, layer: int) -> Self:
        """`weights` below `layers.{layer}.attn.`."""
        return cls(
            layer=layer,
            compressed=config.ratio(layer) > 0,
            heads=config.num_attention_heads,
            output_groups=config.o_groups,
            query_down=weights.projection("wq_a"),
            query_norm=weights["q_norm.weight"],
            query_up=weights.projection("wq_b"),
            sink=weights["attn_sink"],
            indexer=Indexer.from_weights(weights, config, layer) if layer in config.index_source_layer_ids else None,
            output_down=weights["wo_a.weight"].unflatten(0, (config.o_groups, config.o_lora_rank)),
            output_up=weights.projection("wo_b"),
            eps=config.rms_norm_eps,
        )

    def in_layer(self, x: Tensor, window_pool: Tensor, latent: Tensor | None, run: ForwardPass) -> Tensor:
        """x [rows, D] the normalised input, `window_pool` and `latent` of `RowWriter.write` -> [rows, D]."""
        if run.plan.packed is not None:
            latent = packed_attention.query_latents(self, x) if latent is None else latent
            if self.indexer is not None:
                run.selection = packed_attention.select(self.indexer, x, latent, run)
            return self._project(packed_attention.look(self, latent, window_pool, run))
        latent = rms_norm(self.query_down(x), self.query_norm, eps=self.eps)
        if self.indexer is not None:
            run.selection = self.indexer.select(x, latent, run)
        window = from_pool(window_pool, run.window_plan(self.layer).index)
        selection = run.selection if self.compressed and isinstance(run.selection, Selection) else None
        return self._attend(latent, run.rotary(compressed=self.compressed), window, selection)

    def in_draft_block(self, x: Tensor, window: Selection, angles: RotaryAngles) -> Tensor:
        """x [rows, D] the normalised input, `window` all that the rows see -> [rows, D]."""
        latent = rms_norm(self.query_down(x), self.query_norm, eps=self.eps)
        return self._attend(latent, angles, window, None)

    def _attend(self, latent: Tensor, angles: RotaryAngles, window: Selection, selection: Selection | None) -> Tensor:
        queries = angles.rotate(self.query_up(latent).unflatten(1, (self.heads, -1)))
        return self._project(angles.rotate_back(self._look(queries, window, selection)))

    def _look(self, queries: Tensor, window: Selection, selection: Selection | None) -> Tensor:
        """A row's keys have fixed places, the window's by age, then the selection's, so that sums have one order."""
        keys, valid = window.keys, window.valid
        if selection is not None:
            keys, valid = torch.cat((keys, selection.keys), dim=1), torch.cat((valid, selection.valid), dim=1)
        return sink_attention(queries, keys, valid, self.sink, scale=queries.shape[-1] ** -0.5)

    def _project(self, looked: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> [rows, D], through one low-rank matrix per group of heads."""
        grouped = self.output_up.prepare(looked.flatten(1)).unflatten(1, (self.output_groups, -1))
        return self.output_up(grouped_linear(grouped, self.output_down).flatten(1))
