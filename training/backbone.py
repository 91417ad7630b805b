"""The text network on whole sequences, with gradients: the logits of `whalepod.model.network.Network` in mode `off`.

`tests/training/test_backbone.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import wide_dtype, widen
from whalepod.model.config import ModelConfig
from whalepod.model.engram import DEAD, compress, hash_rows
from whalepod.model.rotary import rotary_frequencies

from . import layers, looking
from .parameters import Layer

INDEX_LOSS_STRIDE = 4
"""One row in so many trains the indexers."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a forward differs from serving."""

    select: bool = True
    """Whether rows attend to what the indexers choose; else to every entry that they see."""
    index_loss: bool = False
    offset: int = 0
    """The first row that trains the indexers, below INDEX_LOSS_STRIDE."""


@dataclass(slots=True)
class Pass:
    """What the layers of one forward hand on to each other, [B, T, ...]."""

    ids: Tensor
    documents: Tensor
    streams: Tensor
    """[B · T, S, D]"""
    pre: Tensor
    options: Options
    places: Tensor
    """[B, T]: positions within the documents, by which everything is rotated."""
    first: int = 0
    """Place in its sequence of the first of the T rows."""
    angles: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """cos and sin [B, T, pairs] of layers with and without global KV."""
    entries: Tensor | None = None
    keys: Tensor | None = None
    visible: Tensor | None = None
    chosen: Tensor | None = None
    candidates: Tensor | None = None
    taps: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)
    """Routing bias -> share of the rows that chose each expert."""
    imbalances: list[Tensor] = field(default_factory=list)
    index_losses: list[Tensor] = field(default_factory=list)


class Backbone:
    """Layers of a configuration; holds no weights."""

    def __init__(self, config: ModelConfig, token_map: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of rows and products; `token_map` [vocab] compressed ids."""
        self.config = config
        self.dtype = dtype
        wide = wide_dtype(dtype)
        plain = next(layer for layer, ratio in enumerate(config.compress_ratios) if ratio == 0)
        self.frequencies = {
            True: rotary_frequencies(config.rope(config.last_kv_source), wide).to(device),
            False: rotary_frequencies(config.rope(plain), wide).to(device),
        }
        self.token_map = token_map.to(device)
        self.pad_id = int(token_map[config.engram_pad_token_id])

    def forward(self, tensors: Mapping[str, Tensor], ids: Tensor, documents: Tensor, options: Options) -> Pass:
        """ids and documents [B, T] int64, T a multiple of the window -> the pass after the last layer."""
        config = self.config
        embedded = functional.embedding(ids.flatten(), tensors["embed.weight"]).to(self.dtype)
        pre = torch.zeros(len(embedded), config.hc_mult, dtype=wide_dtype(self.dtype), device=ids.device)
        pre[:, 0] = 1
        streams = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)
        run = Pass(ids, documents, streams, pre, options, places_within(documents))
        run.angles = {compressed: self.angles(run.places, compressed=compressed) for compressed in (False, True)}
        memories = self._memories(tensors, ids, documents)
        for layer in range(config.num_hidden_layers):
            self._layer(Layer(tensors, f"layers.{layer}."), layer, run, memories.get(layer))
        return run

    def hidden(self, tensors: Mapping[str, Tensor], run: Pass) -> Tensor:
        """The normalised rows in front of the head [B · T, D]."""
        return layers.collapsed(run.streams, run.pre, tensors["norm.weight"], self.config.rms_norm_eps)

    def logits(self, tensors: Mapping[str, Tensor], run: Pass) -> Tensor:
        """[B, T, vocab], at least float32."""
        logits = layers.linear(self.hidden(tensors, run), tensors["head.weight"])
        return widen(logits).unflatten(0, run.ids.shape)

    def angles(self, places: Tensor, *, compressed: bool) -> tuple[Tensor, Tensor]:
        """cos and sin [..., pairs] at places [...] of the sequences."""
        angles = places.to(self.frequencies[compressed].dtype).unsqueeze(-1) * self.frequencies[compressed]
        return torch.cos(angles), torch.sin(angles)

    def _memories(self, tensors: Mapping[str, Tensor], ids: Tensor, documents: Tensor) -> dict[int, Tensor]:
        """Layer -> n-gram memory [B · T, columns · width]."""
        config = self.config
        if not config.engram_layer_ids:
            return {}
        tokens = []
        for back in range(config.engram_max_ngram_size):
            earlier = functional.pad(ids, (back, 0), value=DEAD)[:, : ids.shape[1]]
            same = functional.pad(documents, (back, 0), value=-1)[:, : ids.shape[1]] == documents
            tokens.append(torch.where(same, earlier, DEAD))
        newest_first = torch.stack(tokens, dim=-1).flatten(0, 1)
        compressed = compress(newest_first, self.token_map, image_token_id=config.image_token_id)
        return {
            layer: functional.embedding(
                hash_rows(compressed, layout, pad_id=self.pad_id), tensors[f"layers.{layer}.engram.embed.weight"]
            )
            .flatten(1)
            .to(self.dtype)
            for layer, layout in zip(config.engram_layer_ids, config.engram, strict=True)
        }

    def _layer(self, weights: Layer, number: int, run: Pass, memory: Tensor | None) -> None:
        config = self.config
        if memory is not None:
            run.streams = layers.remember(
                run.streams,
                memory,
                weights["engram.wkv.weight"],
                weights["engram.q_weight"],
                weights["engram.k_weight"],
                config.rms_norm_eps,
            )
        if number in config.dspark_target_layer_ids:
            run.taps.append(widen(run.streams).mean(dim=1).to(run.streams.dtype))
        x = layers.collapsed(run.streams, run.pre, weights["attn_norm.weight"], config.rms_norm_eps)
        mixes = self.mixes(weights, "attn", run.streams)
        y = self._attention(weights, number, x.unflatten(0, run.ids.shape), run).flatten(0, 1)
        run.streams, run.pre = layers.expand(y, run.streams, mixes.post, mixes.comb), mixes.pre
        routed, run.streams, run.pre = self.feed_forward(
            weights, run.streams, run.pre, chosen=config.num_experts_per_tok
        )
        run.loads[f"{weights.prefix}ffn.gate.bias"] = routed.load
        run.imbalances.append(routed.imbalance)

    def mixes(self, weights: Layer, sublayer: str, streams: Tensor) -> layers.Mixes:
        """Coefficients of the sublayer in front of which `streams` are."""
        return layers.predict_mixes(
            streams,
            weights[f"hc_{sublayer}_fn"],
            weights[f"hc_{sublayer}_scale"],
            weights[f"hc_{sublayer}_base"],
            rms_eps=self.config.rms_norm_eps,
            eps=self.config.hc_eps,
            iterations=self.config.hc_sinkhorn_iters,
        )

    def feed_forward(
        self, weights: Layer, streams: Tensor, pre: Tensor, *, chosen: int
    ) -> tuple[layers.Routed, Tensor, Tensor]:
        """The experts' sublayer: -> what they made, streams and pre after it."""
        config = self.config
        x = layers.collapsed(streams, pre, weights["ffn_norm.weight"], config.rms_norm_eps)
        mixes = self.mixes(weights, "ffn", streams)
        routed = layers.experts(
            x,
            weights["ffn.gate.weight"],
            weights["ffn.gate.bias"],
            weights["ffn.w1"],
            weights["ffn.w3"],
            weights["ffn.w2"],
            chosen,
            config.routed_scaling_factor,
            config.swiglu_limit,
        )
        return routed, layers.expand(routed.output, streams, mixes.post, mixes.comb), mixes.pre

    def _attention(self, weights: Layer, number: int, x: Tensor, run: Pass) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        config, eps = self.config, self.config.rms_norm_eps
        compressed = config.ratio(number) > 0
        cos, sin = run.angles[compressed]
        queries, latent = layers.queries(
            x,
            weights["attn.wq_a.weight"],
            weights["attn.q_norm.weight"],
            weights["attn.wq_b.weight"],
            cos,
            sin,
            config.num_attention_heads,
            eps,
        )
        window = layers.window_keys(x, weights["attn.wkv.weight"], weights["attn.kv_norm.weight"], cos, sin, eps)
        if number in config.kv_source_layer_ids:
            self._write_entries(weights, number, x, run)
        if number in config.index_source_layer_ids:
            self._select(weights, number, x, latent, run)
        looked, totals = self._look(number, queries, window, weights["attn.attn_sink"], run)
        if run.options.index_loss and number in config.index_source_layer_ids:
            run.index_losses.append(self._index_loss(weights, x, latent, queries, totals, run))
        return layers.project(
            looked, weights["attn.wo_a.weight"], weights["attn.wo_b.weight"], cos, sin, config.o_groups
        )

    def _look(self, number: int, queries: Tensor, window: Tensor, sink: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """queries [B, T, H, d], window [B, T, d] -> output [B, T, H, d], log of the denominators [B, T, H]."""
        reach = self.config.window
        if self.config.ratio(number) == 0:
            return looking.look_at_window(queries, window, run.documents, sink, reach)
        assert run.entries is not None and run.chosen is not None
        return looking.look_at_both(queries, window, run.documents, sink, run.entries, run.chosen, reach)

    def _write_entries(self, weights: Layer, number: int, x: Tensor, run: Pass) -> None:
        ratio = self.config.ratio(number)
        cos, sin = (part[:, ::ratio] for part in run.angles[True])
        run.entries, run.keys = self._entries_of(weights, x, cos, sin, ratio)
        run.visible = looking.visible_entries(run.documents, ratio)

    def _entries_of(self, weights: Layer, x: Tensor, cos: Tensor, sin: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """x [B, T, D] whole groups, cos and sin [B, E, pairs] of their starts -> entries [B, E, head_dim], index keys
        [B, E, index_head_dim]."""
        eps = self.config.rms_norm_eps
        gate = weights["attn.compressor.wgate.weight"] if ratio > 1 else None
        latent = looking.latents(
            x, weights["attn.compressor.wkv.weight"], gate, weights["attn.compressor.norm.weight"], ratio, eps
        )
        keys = looking.index_keys_of(
            latent.detach(),
            weights["attn.indexer.wk.weight"],
            weights["attn.indexer.k_norm.weight"],
            cos,
            sin,
            eps,
        )
        return looking.entries_of(latent, cos, sin), keys

    def _index_scores(self, weights: Layer, x: Tensor, latent: Tensor, run: Pass, rows: slice) -> Tensor:
        """x and latent [B, T, ...] -> scores of some of the rows [B, rows, E]."""
        assert run.keys is not None
        cos, sin = (part[:, rows] for part in run.angles[True])
        queries, head_weights = looking.index_queries_of(
            latent[:, rows],
            x[:, rows],
            weights["attn.indexer.wq_b.weight"],
            weights["attn.indexer.weights_proj.weight"],
            cos,
            sin,
            self.config.index_n_heads,
        )
        return looking.index_scores(queries, head_weights, run.keys)

    @torch.no_grad()
    def _select(self, weights: Layer, number: int, x: Tensor, latent: Tensor, run: Pass) -> None:
        """Publish what rows attend to, until the next index source does. Gradients do not pass through the choice."""
        config = self.config
        assert run.visible is not None
        if not run.options.select:
            run.chosen = run.visible
            return
        scores = self._index_scores(weights, x, latent, run, slice(None))
        allowed = run.visible
        if number == config.candidate_source_layer_id:
            block, blocks = config.candidate_block_size, config.candidate_topk_blocks
            run.candidates = looking.candidates(scores, run.visible, block=block, blocks=blocks, first=run.first)
        elif number > config.candidate_source_layer_id:
            assert run.candidates is not None
            allowed = allowed & run.candidates
        run.chosen = looking.best(scores, allowed, config.index_topk)

    def _index_loss(
        self, weights: Layer, x: Tensor, latent: Tensor, queries: Tensor, totals: Tensor, run: Pass
    ) -> Tensor:
        assert run.entries is not None and run.visible is not None
        some = slice(run.options.offset, None, INDEX_LOSS_STRIDE)
        scores = self._index_scores(weights, x.detach(), latent.detach(), run, some)
        return looking.index_loss(
            scores,
            queries.detach()[:, some],
            run.entries.detach(),
            totals.detach()[:, some],
            run.visible[:, some],
        )


def places_within(documents: Tensor) -> Tensor:
    """documents [B, T] -> the place of each token in its document."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    first = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - torch.where(first, place, 0).cummax(dim=1).values
