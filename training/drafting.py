"""The drafter on whole sequences, with gradients: many rounds at once, each at an anchor inside a known text.

What follows an anchor is known, so the Markov chain is given the tokens that the drafts should have been; the logits
and confidences are those of `whalepod.model.draft.Drafter` when it chooses these tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import wide_dtype, widen

from . import layers
from .backbone import Backbone, Pass
from .compiling import compiled_on_gpu
from .looking import look_at_rows
from .parameters import Layer


class Rounds(NamedTuple):
    """What every anchor drafted; anchors of a sequence one after the other, G in all."""

    logits: Tensor
    """[G, block, vocab], at least float32"""
    confidence: Tensor
    """[G, block] log-odds"""
    load: dict[str, Tensor]
    imbalance: Tensor


class Drafting:
    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.config = backbone.config

    def forward(self, tensors: Mapping[str, Tensor], run: Pass, anchors: Tensor) -> Rounds:
        """`run` of the backbone, whose taps are taken as they are; anchors [A] places, the same in every sequence, each
        at most T - block - 1. The tensors of the backbone get no gradient."""
        config, block = self.config, self.config.dspark_block_size
        main = self._main(tensors, run)
        places = anchors[:, None] + torch.arange(block, device=anchors.device)
        known = run.ids[:, places].flatten(0, 1)
        streams, pre = self._begin(tensors, known[:, 0])
        loads: dict[str, Tensor] = {}
        imbalances: list[Tensor] = []
        for number in range(config.num_nextn_predict_layers):
            weights = Layer(tensors, f"mtp.{number}.")
            x = layers.collapsed(streams, pre, weights["attn_norm.weight"], config.rms_norm_eps)
            mixes = self.backbone.mixes(weights, "attn", streams)
            y = self._attention(weights, x.unflatten(0, known.shape), main, run, anchors).flatten(0, 1)
            streams, pre = layers.expand(y, streams, mixes.post, mixes.comb), mixes.pre
            routed, streams, pre = self.backbone.feed_forward(
                weights, streams, pre, chosen=config.dspark_num_experts_per_tok
            )
            loads[f"{weights.prefix}ffn.gate.bias"] = routed.load
            imbalances.append(routed.imbalance)
        logits, confidence = self._heads(tensors, streams, pre, known)
        return Rounds(logits, confidence, loads, torch.stack(imbalances).sum())

    def _main(self, tensors: Mapping[str, Tensor], run: Pass) -> Tensor:
        """[B, T, D]: what every block remembers of a row."""
        taps = torch.cat([tap.detach() for tap in run.taps], dim=1)
        main = layers.linear(taps, tensors["mtp.0.main_proj.weight"])
        return layers.rms_norm(main, tensors["mtp.0.main_norm.weight"], self.config.rms_norm_eps).unflatten(
            0, run.ids.shape
        )

    def _begin(self, tensors: Mapping[str, Tensor], anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """anchor_ids [G] -> streams [G · block, S, D] of the anchor's token, then noise; pre."""
        config = self.config
        ids = torch.full(
            (len(anchor_ids), config.dspark_block_size), config.dspark_noise_token_id, device=anchor_ids.device
        )
        ids[:, 0] = anchor_ids
        embedded = functional.embedding(ids.flatten(), tensors["embed.weight"].detach()).to(self.backbone.dtype)
        pre = torch.zeros(len(embedded), config.hc_mult, dtype=wide_dtype(embedded.dtype), device=embedded.device)
        pre[:, 0] = 1
        return embedded.unsqueeze(1).repeat(1, config.hc_mult, 1), pre

    def _attention(self, weights: Layer, x: Tensor, main: Tensor, run: Pass, anchors: Tensor) -> Tensor:
        """x [G, block, D] -> [G, block, D]."""
        config, eps, window = self.config, self.config.rms_norm_eps, self.config.window
        kv, norm = weights["attn.wkv.weight"], weights["attn.kv_norm.weight"]
        remembered = layers.window_keys(main, kv, norm, *run.angles[False], eps)
        before = anchors[:, None] + torch.arange(-window, 0, device=anchors.device)
        same = run.documents[:, before.clamp(min=0)] == run.documents[:, anchors, None]
        seen = (same & (before >= 0)).flatten(0, 1)
        context = remembered[:, before.clamp(min=0)].flatten(0, 1)
        places = run.places[:, anchors].flatten()[:, None] + torch.arange(x.shape[1], device=anchors.device)
        cos, sin = self.backbone.angles(places, compressed=False)
        own = layers.window_keys(x, kv, norm, cos, sin, eps)
        queries, _ = layers.queries(
            x,
            weights["attn.wq_a.weight"],
            weights["attn.q_norm.weight"],
            weights["attn.wq_b.weight"],
            cos,
            sin,
            config.num_attention_heads,
            eps,
        )
        looked = look_at_rows(queries, context, own, seen, weights["attn.attn_sink"])
        return layers.project(
            looked, weights["attn.wo_a.weight"], weights["attn.wo_b.weight"], cos, sin, config.o_groups
        )

    def _heads(
        self, tensors: Mapping[str, Tensor], streams: Tensor, pre: Tensor, known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """known [G, block]: the token before each draft -> logits [G, block, vocab], confidence [G, block]."""
        last = f"mtp.{self.config.num_nextn_predict_layers - 1}."
        hidden = layers.collapse(streams, pre)
        normed = layers.rms_norm(hidden, tensors[f"{last}norm.weight"], self.config.rms_norm_eps)
        embedded = functional.embedding(known.flatten(), tensors[f"{last}markov_head.embed.weight"]).to(hidden.dtype)
        logits = _draft_logits(
            normed, tensors["head.weight"].detach(), embedded, tensors[f"{last}markov_head.head.weight"]
        )
        inputs = torch.cat((hidden, embedded), dim=1) if self.config.confidence_head_with_markov else hidden
        proj = tensors[f"{last}confidence_head.proj.weight"]
        confidence = functional.linear(widen(inputs.detach()), proj)[:, 0]
        return logits.unflatten(0, known.shape), confidence.unflatten(0, known.shape)


@compiled_on_gpu
def _draft_logits(normed: Tensor, head: Tensor, embedded: Tensor, markov: Tensor) -> Tensor:
    return widen(layers.linear(normed, head)) + widen(layers.linear(embedded, markov))
