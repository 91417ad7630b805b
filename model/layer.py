"""One layer: n-gram memory, attention and experts around the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

from torch import Tensor

from whalepod.kernels.mhc import Mixes, collapse, expand, predict_mixes, prepare_weights, spread_scale
from whalepod.kernels.numerics import narrow, widen
from whalepod.kernels.rms_norm import rms_norm

from .attention import Attention, RowWriter
from .config import ModelConfig
from .engram import Engram
from .feed_forward import FeedForward
from .forward_pass import ForwardPass
from .projection import Weights
from .routed_experts import MakeExperts


@dataclass(frozen=True, slots=True)
class Mixer:
    """Predicts a sublayer's coefficients from the streams in front of it."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    rms_eps: float
    eps: float
    iterations: int

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, sublayer: str) -> Self:
        return cls(
            fn=prepare_weights(weights[f"hc_{sublayer}_fn"]),
            scale=spread_scale(weights[f"hc_{sublayer}_scale"], config.hc_mult),
            base=weights[f"hc_{sublayer}_base"],
            rms_eps=config.rms_norm_eps,
            eps=config.hc_eps,
            iterations=config.hc_sinkhorn_iters,
        )

    def __call__(self, streams: Tensor) -> Mixes:
        return predict_mixes(
            streams,
            self.fn,
            self.scale,
            self.base,
            rms_eps=self.rms_eps,
            eps=self.eps,
            iterations=self.iterations,
        )


class ResidualState(Protocol):
    """The streams that a layer or a draft block works on."""

    streams: Tensor
    pre: Tensor
    text: Tensor | None

    @property
    def count(self) -> int:
        """Rows without padding."""
        ...

    def record(self, name: str, value: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class LayerTail:
    """What a layer computes after its rows are in the caches. The last KV source runs it on kept rows only."""

    name: str
    attention: Attention
    attention_mixer: Mixer
    feed_forward: FeedForward
    feed_forward_norm: Tensor
    feed_forward_mixer: Mixer
    eps: float

    @classmethod
    def from_weights(
        cls,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        *,
        name: str,
        experts: int,
        chosen: int,
        make_experts: MakeExperts,
    ) -> Self:
        """`weights` below `layers.{layer}.` or a draft block's. `name` is what recorders see."""
        return cls(
            name=name,
            attention=Attention.from_weights(weights.below("attn."), config, layer),
            attention_mixer=Mixer.from_weights(weights, config, "attn"),
            feed_forward=FeedForward.from_weights(
                weights.below("ffn."), config, experts=experts, chosen=chosen, make_experts=make_experts
            ),
            feed_forward_norm=weights["ffn_norm.weight"],
            feed_forward_mixer=Mixer.from_weights(weights, config, "ffn"),
            eps=config.rms_norm_eps,
        )

    def __call__(self, state: ResidualState, attend: Callable[[], Tensor]) -> None:
        """`attend` gives the attention's output [rows, D] for the collapsed, normalised streams."""
        mixes = self.attention_mixer(state.streams)
        y = attend()
        state.record(f"{self.name}.attn_out", y)
        self._mix(state, y, mixes, "attn")
        x = rms_norm(collapse(state.streams, state.pre), self.feed_forward_norm, eps=self.eps)
        mixes = self.feed_forward_mixer(state.streams)
        y, ids, weights = self.feed_forward(x, state.text, state.count)
        state.record(f"{self.name}.expert_ids", ids)
        state.record(f"{self.name}.expert_weights", weights)
        state.record(f"{self.name}.ffn_out", y)
        self._mix(state, y, mixes, "ffn")
        state.record(f"{self.name}.out", state.streams)
        state.record(f"{self.name}.pre_mix_next", state.pre)

    def _mix(self, state: ResidualState, y: Tensor, mixes: Mixes, sublayer: str) -> None:
        """A sublayer's own post and comb take in its output; its pre is for the next sublayer."""
        for part, value in mixes._asdict().items():
            state.record(f"{self.name}.hc_{sublayer}_{part}", value)
        state.streams = expand(y, state.streams, mixes)
        state.pre = mixes.pre


@dataclass(frozen=True, slots=True)
class Layer:
    number: int
    engram: Engram | None
    attention_norm: Tensor
    writer: RowWriter
    tail: LayerTail | None
    """None in the last KV source of role `encoder`."""
    eps: float

    @classmethod
    def from_weights(
        cls, weights: Weights, config: ModelConfig, layer: int, *, producers_only: bool, make_experts: MakeExperts
    ) -> Self:
        """`weights` below `layers.{layer}.`."""
        engram = tail = None
        if layer in config.engram_layer_ids:
            gate_weight = weights["engram.q_weight"] * weights["engram.k_weight"]
            engram = Engram(weights.projection("engram.wkv"), gate_weight, config.rms_norm_eps)
        if not producers_only:
            experts, chosen = config.n_routed_experts, config.num_experts_per_tok
            name = f"layer{layer}"
            tail = LayerTail.from_weights(
                weights, config, layer, name=name, experts=experts, chosen=chosen, make_experts=make_experts
            )
        writer = RowWriter.from_weights(weights.below("attn."), config, layer)
        if tail is not None and layer != config.last_kv_source:
            writer, tail = _joined(writer, tail)
        return cls(
            number=layer,
            engram=engram,
            attention_norm=weights["attn_norm.weight"],
            writer=writer,
            tail=tail,
            eps=config.rms_norm_eps,
        )

    def __call__(self, run: ForwardPass) -> None:
        name = f"layer{self.number}"
        if self.engram is not None:
            run.streams = self.engram(run.streams, run.memories[self.number], run.text)
            run.record(f"{name}.engram_out", run.streams)
        if self.number in run.config.dspark_target_layer_ids:
            run.taps.append(narrow(widen(run.streams).mean(dim=1), run.streams.dtype))
        x = rms_norm(collapse(run.streams, run.pre), self.attention_norm, eps=self.eps)
        tail, last_source = self.tail, self.number == run.config.last_kv_source
        looks_from_all = tail is not None and not (last_source and run.plan.kept_index is not None)
        window_pool, latent = self.writer.write(x, run, tail.attention if tail is not None and looks_from_all else None)
        if tail is None:
            return
        if last_source:
            x = run.keep(x)
            if run.rows.count == 0:
                return
        run.record(f"{name}.attn_in", x)
        tail(run, lambda: tail.attention.in_layer(x, window_pool, latent, run))


def _joined(writer: RowWriter, tail: LayerTail) -> tuple[RowWriter, LayerTail]:
    """With the first matrices of queries and window rows in one. Not in the last KV source: it may look from fewer rows
    than it writes, and role `encoder` only writes, with the same bits."""
    joined, query_down, kv = tail.attention.query_down.above(writer.kv)
    attention = replace(tail.attention, query_down=query_down)
    return replace(writer, kv=kv, joined=joined), replace(tail, attention=attention)
