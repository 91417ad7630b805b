"""Choosing entries of global KV: an index source scores the keys of its KV source and publishes the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whalepod.kernels.indexer import candidate_mask, index_scores, select_top
from whalepod.kernels.numerics import wide_dtype

from .batch_plan import pool_rows
from .config import ModelConfig
from .forward_pass import ForwardPass, Selection
from .projection import Projection, Weights


@dataclass(frozen=True, slots=True)
class Indexer:
    layer: int
    source: int
    """The KV source whose keys are scored."""
    config: ModelConfig
    queries: Projection
    """[index_n_heads · index_head_dim, q_lora_rank]"""
    head_weights: Projection
    """[index_n_heads, D]"""
    recent: bool = False
    """FOR MEASURING ONLY: the newest entries are the best, whatever they hold."""

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, layer: int) -> Self:
        """`weights` below `layers.{layer}.attn.`."""
        source = config.kv_source(layer)
        assert source is not None, f"layer {layer} has no global KV to index"
        return cls(
            layer=layer,
            source=source,
            config=config,
            queries=weights.projection("indexer.wq_b"),
            head_weights=weights.plain_projection("indexer.weights_proj"),
        )

    def select(self, x: Tensor, latent: Tensor, run: ForwardPass) -> Selection:
        """x [rows, D] the layer's normalised input, latent [rows, q_lora_rank] its normalised query latent."""
        config = self.config
        visible = torch.from_numpy((run.rows.positions + 1) // config.ratio(self.source)).to(x.device)
        scores = self._scores(x, latent, run)
        allowed = torch.arange(scores.shape[1], device=x.device) < visible[:, None]
        if self.layer == config.candidate_source_layer_id:
            block, top = config.candidate_block_size, config.candidate_topk_blocks
            run.candidates = candidate_mask(scores, visible, block=block, top_blocks=top)
            run.record(f"layer{self.layer}.candidate_mask", run.candidates)
        elif self.layer > config.candidate_source_layer_id:
            assert run.candidates is not None
            allowed = allowed & run.candidates
        chosen = select_top(scores, allowed, count=config.index_topk)
        run.record(f"layer{self.layer}.index_rows", chosen)
        return self._gather(chosen, run)

    def _scores(self, x: Tensor, latent: Tensor, run: ForwardPass) -> Tensor:
        """[rows, entries], entries of the longest segment; zeros where all visible entries are chosen anyway."""
        config, ratio = self.config, self.config.ratio(self.source)
        heads, width = config.index_n_heads, config.index_head_dim
        entries = (run.rows.ends // ratio).tolist()
        scores = torch.zeros(x.shape[0], max(entries), dtype=wide_dtype(x.dtype), device=x.device)
        enough = config.index_topk
        if self.layer == config.candidate_source_layer_id:
            enough = min(enough, config.candidate_topk_blocks * config.candidate_block_size)
        if max(entries) <= enough:
            return scores
        if self.recent:
            return torch.arange(max(entries), dtype=scores.dtype, device=x.device).expand(x.shape[0], -1)
        queries = run.rotary(compressed=True).rotate(self.queries(latent).unflatten(1, (heads, width)))
        queries = run.caches.formats.index_key.round_trip(queries)
        weights = self.head_weights(x, out_dtype=scores.dtype) * (width**-0.5 * heads**-0.5)
        keys = self._keys(run)
        for rows, count, segment_keys in zip(run.rows.slices(), entries, keys, strict=True):
            if rows.start < rows.stop and count > enough:
                scores[rows, :count] = index_scores(queries[rows], weights[rows], segment_keys)
        return scores

    def _keys(self, run: ForwardPass) -> list[Tensor]:
        """Decoded keys [entries, index_head_dim] of each segment."""
        if self.source not in run.decoded_index_keys:
            pool = run.caches.index_keys[self.source]
            decode, width = run.caches.formats.index_key.decode, self.config.index_head_dim
            ratio = self.config.ratio(self.source)
            decoded: list[Tensor] = []
            for segment, count in enumerate((run.rows.ends // ratio).tolist()):
                entries, per_block = torch.arange(count, device=pool.device), pool.shape[1]
                rows = pool_rows(run.plan.gather.tables[segment, entries // per_block], entries, per_block)
                decoded.append(decode(pool.flatten(0, 1).index_select(0, rows), width, run.streams.dtype))
            run.decoded_index_keys[self.source] = decoded
        return run.decoded_index_keys[self.source]

    def _gather(self, chosen: Tensor, run: ForwardPass) -> Selection:
        """chosen [rows, index_topk], -1 for none -> what the rows attend to."""
        pool = run.caches.global_kv[self.source]
        segments = torch.from_numpy(run.rows.segments).to(pool.device)[:, None]
        valid = chosen >= 0
        entries, per_block = chosen.clamp(min=0), pool.shape[1]
        rows = pool_rows(run.plan.gather.tables[segments, entries // per_block], entries, per_block)
        records = pool.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
        keys = run.caches.formats.global_kv.decode(records, self.config.head_dim, run.streams.dtype)
        return Selection(keys.masked_fill_(~valid[:, :, None], 0), valid)
