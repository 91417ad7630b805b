"""The drafter: guesses the next few tokens of a sequence from what the target left in its draft windows.

    rows of the target ─ remember ─▶ draft window of each block            (context: from the target's taps)
    anchor, noise, noise … ─▶ block 0 ─▶ block 1 ─▶ … ─▶ base logits ─ Markov chain ─▶ drafted tokens

Every forward of the network remembers its kept rows. A round needs nothing else of the target: no hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.linear import linear
from whalepod.kernels.mhc import collapse
from whalepod.kernels.numerics import wide_dtype
from whalepod.kernels.rms_norm import rms_norm

from .attention import from_pool
from .caches import Caches
from .config import ModelConfig
from .forward_pass import ForwardPass, Recorder, Selection
from .layer import LayerTail
from .packed_attention import put_records
from .plan_transfer import on_device
from .projection import Projection, Weights
from .rotary import RotaryAngles
from .routed_experts import MakeExperts
from .rows import Rows

Chooser = Callable[[int, Tensor], Tensor]
"""(number of the drafted token, its logits [anchors, vocab]) -> the chosen ids [anchors] int64."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A sequence whose next tokens are drafted: its newest token, which the target has not run yet."""

    slot: int
    position: int
    token_id: int
    window_start: int = 0
    """No draft window row below this position is there: the request's floor, or the start of a replay above it."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What one round drafted, for each anchor."""

    ids: Tensor
    """[anchors, tokens] int64"""
    logits: Tensor
    """[anchors, tokens, vocab], at least float32: the distribution each token was chosen from."""
    confidence: Tensor | None
    """[anchors, tokens]: log-odds that a draft is accepted if those before it are. None without the head."""


@dataclass(slots=True)
class DraftState:
    """The residual streams of one round's rows."""

    streams: Tensor
    pre: Tensor
    count: int
    text: Tensor | None = None
    recorder: Recorder | None = None

    def record(self, name: str, value: Tensor) -> None:
        if self.recorder is not None:
            self.recorder(name, value[: self.count])


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Rows of a round, and what each sees: W context rows before the anchor, and all rows of its own block."""

    rows: Rows
    positions: Tensor
    """[rows]"""
    previous: Tensor
    """[anchors · W] rows of the draft rings, flat over slots."""
    index: Tensor
    """[rows, W + block] rows of the pool: a zero row, the context rows, this round's rows; 0 is none."""

    @classmethod
    def build(cls, anchors: Sequence[Anchor], *, window: int, block: int, ring_rows: int) -> Self:
        positions = np.array([anchor.position for anchor in anchors], dtype=np.int64)
        slots = np.array([anchor.slot for anchor in anchors], dtype=np.int64)
        lows = np.array([max(anchor.window_start, 0) for anchor in anchors], dtype=np.int64)
        rows = Rows.between(positions, positions + block)
        context = positions[:, None] + np.arange(-window, 0)
        places = 1 + np.arange(len(anchors))[:, None] * window + np.arange(window)
        own = 1 + len(anchors) * window + np.arange(len(anchors))[:, None] * block + np.arange(block)
        seen = np.concatenate((np.where(context >= lows[:, None], places, 0), own), axis=1)
        return cls(
            rows=rows,
            positions=torch.from_numpy(rows.positions),
            previous=torch.from_numpy(slots[:, None] * ring_rows + context % ring_rows).flatten(),
            index=torch.from_numpy(seen[rows.segments]),
        )


@dataclass(frozen=True, slots=True)
class DraftBlock:
    number: int
    attention_norm: Tensor
    kv: Projection
    kv_norm: Tensor
    tail: LayerTail
    eps: float

    @classmethod
    def from_weights(cls, weights: Weights, config: ModelConfig, number: int, *, make_experts: MakeExperts) -> Self:
        """`weights` below `mtp.{number}.`."""
        return cls(
            number=number,
            attention_norm=weights["attn_norm.weight"],
            kv=weights.below("attn.").projection("wkv"),
            kv_norm=weights["attn.kv_norm.weight"],
            tail=LayerTail.from_weights(
                weights,
                config,
                config.num_hidden_layers + number,
                name=f"block{number}",
                experts=config.dspark_n_routed_experts,
                chosen=config.dspark_num_experts_per_tok,
                make_experts=make_experts,
            ),
            eps=config.rms_norm_eps,
        )

    def records(self, x: Tensor, angles: RotaryAngles, caches: Caches) -> Tensor:
        """x [rows, D] -> window records [rows, bytes]."""
        return caches.formats.window.encode(angles.rotate(rms_norm(self.kv(x), self.kv_norm, eps=self.eps)))

    def __call__(self, state: DraftState, plan: DraftPlan, angles: RotaryAngles, caches: Caches) -> None:
        x = rms_norm(collapse(state.streams, state.pre), self.attention_norm, eps=self.eps)
        window = self._window(self.records(x, angles, caches), plan, caches, x.dtype)
        self.tail(state, lambda: self.tail.attention.in_draft_block(x, window, angles))

    def _window(self, own: Tensor, plan: DraftPlan, caches: Caches, dtype: torch.dtype) -> Selection:
        context = caches.draft_windows[self.number].flatten(0, 1)[plan.previous]
        pool = torch.cat((own.new_zeros(1, own.shape[1]), context, own))
        return from_pool(caches.formats.window.decode(pool, self.kv.weight.shape[0], dtype), plan.index)


@dataclass(frozen=True, slots=True)
class Drafter:
    config: ModelConfig
    embed: Tensor
    head: Tensor
    """The target's."""
    main: Projection
    """[D, targets · D]: turns a row's taps into what every block remembers of it."""
    main_norm: Tensor
    blocks: tuple[DraftBlock, ...]
    norm: Tensor
    markov_embed: Tensor
    """[vocab, rank]"""
    markov_head: Tensor
    """[vocab, rank]"""
    confidence: Tensor | None
    """[1, D] or [1, D + rank]"""
    frequencies: Tensor

    @classmethod
    def from_weights(
        cls, weights: Weights, config: ModelConfig, frequencies: Tensor, *, make_experts: MakeExperts
    ) -> Self:
        """`weights` of the whole model; `frequencies` of layers without global KV."""
        count = config.num_nextn_predict_layers
        first, last = weights.below("mtp.0."), weights.below(f"mtp.{count - 1}.")
        return cls(
            config=config,
            embed=weights["embed.weight"],
            head=weights["head.weight"],
            main=first.projection("main_proj"),
            main_norm=first["main_norm.weight"],
            blocks=tuple(
                DraftBlock.from_weights(weights.below(f"mtp.{n}."), config, n, make_experts=make_experts)
                for n in range(count)
            ),
            norm=last["norm.weight"],
            markov_embed=last["markov_head.embed.weight"],
            markov_head=last["markov_head.head.weight"],
            confidence=last["confidence_head.proj.weight"] if config.enable_confidence_head else None,
            frequencies=frequencies,
        )

    def remember(self, run: ForwardPass) -> None:
        """Leave the kept rows of a forward, all of whose layers have run, in the draft windows."""
        caches = run.caches
        taps = torch.cat(run.taps, dim=1)
        run.record("target_hidden", taps)
        x = rms_norm(self.main(taps), self.main_norm, eps=self.config.rms_norm_eps)
        angles = run.rotary(compressed=False)
        for block in self.blocks:
            ring = caches.draft_windows[block.number]
            if run.plan.packed is not None:
                window = run.plan.packed.upper_window
                put_records(block.kv(x), block.kv_norm, angles, window, ring, eps=block.eps)
            else:
                plan = run.plan.gather.upper_window
                ring.flatten(0, 1)[plan.write_slots] = block.records(x, angles, caches)[plan.write_rows]

    @torch.inference_mode()
    def draft(
        self,
        anchors: Sequence[Anchor],
        caches: Caches,
        *,
        choose: Chooser | None = None,
        tokens: int | None = None,
        recorder: Recorder | None = None,
    ) -> Drafts:
        """One round for every anchor; greedy unless `choose` draws. Changes no cache. `tokens`: how many to draft of
        the block; None: all.

        The target must have run the rows before each anchor, from its `window_start` on or W rows at least.
        """
        config, block = self.config, self.config.dspark_block_size
        plan = DraftPlan.build(anchors, window=config.window, block=block, ring_rows=caches.ring_rows)
        plan = on_device(plan, caches.device)
        state = self._begin(anchors, plan, recorder)
        angles = RotaryAngles.at(plan.positions, self.frequencies)
        for draft_block in self.blocks:
            draft_block(state, plan, angles, caches)
        hidden = collapse(state.streams, state.pre)
        state.record("draft_hidden", hidden)
        normed = rms_norm(hidden, self.norm, eps=config.rms_norm_eps)
        base = linear(normed, self.head, out_dtype=wide_dtype(hidden.dtype))
        state.record("base_logits", base)
        count = len(anchors) * block
        base, hidden = (rows[:count].unflatten(0, (-1, block))[:, :tokens] for rows in (base, hidden))
        return self._chain(anchors, base, hidden, choose, recorder)

    def _begin(self, anchors: Sequence[Anchor], plan: DraftPlan, recorder: Recorder | None) -> DraftState:
        """The anchor's token, then noise, in every stream."""
        noise = [self.config.dspark_noise_token_id] * (self.config.dspark_block_size - 1)
        ids = torch.tensor([token for anchor in anchors for token in (anchor.token_id, *noise)])
        ids = torch.cat((ids, ids[-1:].expand(len(plan.rows.positions) - len(ids)))).to(self.embed.device)
        streams = self.embed[ids][:, None, :].repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(len(ids), self.config.hc_mult, dtype=wide_dtype(streams.dtype), device=streams.device)
        pre[:, 0] = 1
        return DraftState(streams, pre, plan.rows.count, recorder=recorder)

    def _chain(
        self,
        anchors: Sequence[Anchor],
        base: Tensor,
        hidden: Tensor,
        choose: Chooser | None,
        recorder: Recorder | None,
    ) -> Drafts:
        """base [anchors, block, vocab], hidden [anchors, block, D]: each token depends on the one before it."""
        previous = torch.tensor([anchor.token_id for anchor in anchors], device=base.device)
        ids: list[Tensor] = []
        biases: list[Tensor] = []
        confidence: list[Tensor] = []
        for number in range(base.shape[1]):
            embedded = self.markov_embed[previous]
            biases.append(linear(embedded, self.markov_head, out_dtype=base.dtype))
            if self.confidence is not None:
                confidence.append(self._confidence(hidden[:, number], embedded, self.confidence))
            logits = base[:, number] + biases[-1]
            previous = logits.argmax(dim=-1) if choose is None else choose(number, logits).to(logits.device)
            ids.append(previous)
        if recorder is not None:
            recorder("markov_bias", torch.stack(biases, dim=1).flatten(0, 1))
        return Drafts(
            ids=torch.stack(ids, dim=1),
            logits=base + torch.stack(biases, dim=1),
            confidence=torch.stack(confidence, dim=1) if confidence else None,
        )

    def _confidence(self, hidden: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
        """hidden [anchors, D] before the final norm, embedded [anchors, rank] of the token before -> [anchors]."""
        inputs = torch.cat((hidden, embedded), dim=1) if self.config.confidence_head_with_markov else hidden
        return linear(inputs, weight, out_dtype=wide_dtype(hidden.dtype))[:, 0]
