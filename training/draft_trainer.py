"""Trains the drafter against the finished backbone, which it leaves as it is.

A draft is good if the backbone would have said it, so drafts learn the backbone's distribution at every known place;
the confidence head learns whether the most likely draft is the backbone's choice, given that those before it were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import widen
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import Part

from . import layers
from .backbone import Backbone, Options, Pass
from .batches import Batch, Batches, Corpus, Layout, Shape, by_length
from .compiling import compiled_on_gpu
from .drafting import Drafting
from .optimiser import Optimiser, Rates, rate_scale
from .parameters import parts
from .progress import FigureLog, Progress
from .states import save_state
from .trainer import NOT_TRAINED, RATES, SHORT, STATE, balance_experts


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    shape: Shape = SHORT
    anchors: int = 128
    """Rounds in each sequence."""
    rates: Rates = RATES
    warm_up: float = 0.03
    decay: float = 0.7
    choice: float = 0.5
    """Weight of the backbone's first choice, beside its distribution."""
    elsewhere: float = 0.3
    """Weight of places that a greedy backbone would not have come to."""
    confidence: float = 0.2
    balance: float = 1e-3
    bias_rate: float = 1e-3
    clip: float = 1.0
    seed: int = 0
    log_steps: int = 20
    save_s: float = 90.0
    valid_batches: int = 4


class Judged(NamedTuple):
    """Rounds against the backbone, each [G, block] float32."""

    divergence: Tensor
    choice_loss: Tensor
    confidence_loss: Tensor
    right: Tensor
    """1 where the most likely draft is the backbone's choice."""
    greedy: Tensor
    """1 where all known tokens before are the backbone's choices."""


def judge(drafted: Tensor, target: Tensor, confidence: Tensor, known: Tensor) -> Judged:
    """drafted and target [G, block, vocab] logits, confidence [G, block], known [G, block] the tokens that follow."""
    divergence, choice_loss, choice, drafts = _compare(drafted, target)
    right = (drafts == choice).to(divergence.dtype)
    greedy = _right_before((known == choice).to(divergence.dtype))
    confidence_loss = functional.binary_cross_entropy_with_logits(confidence, right, reduction="none")
    return Judged(divergence, choice_loss, confidence_loss, right, greedy)


@compiled_on_gpu
def _compare(drafted: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> divergence of the drafts' distribution, loss of the target's choice, that choice, the most likely draft, each
    [G, block]."""
    log_drafted = torch.log_softmax(drafted, dim=-1)
    log_target = torch.log_softmax(target, dim=-1)
    divergence = (log_target.exp() * (log_target - log_drafted)).sum(dim=-1)
    choice = target.argmax(dim=-1)
    choice_loss = -log_drafted.gather(2, choice.unsqueeze(2)).squeeze(2)
    return divergence, choice_loss, choice, drafted.argmax(dim=-1)


@dataclass(slots=True)
class DraftTrainer:
    config: ModelConfig
    corpus: Corpus
    valid: Corpus
    recipe: DraftRecipe
    backbone: Backbone
    tensors: dict[str, Tensor]
    """The whole model, by stacked name, float32."""
    device: torch.device
    step: int = 0
    drafting: Drafting = field(init=False)
    optimiser: Optimiser = field(init=False)

    def __post_init__(self) -> None:
        self.drafting = Drafting(self.backbone)
        trained: dict[str, Tensor] = {}
        for part, names in parts(self.tensors, self.config).items():
            for name in names:
                if part is Part.DRAFT:
                    if not name.endswith(NOT_TRAINED):
                        trained[name] = self.tensors[name].requires_grad_(True)
                else:  # As it ships.
                    self.tensors[name] = as_shipped(name, self.tensors[name].detach())
        self.optimiser = Optimiser(trained, self.recipe.rates)

    def run(self, progress: Progress, out: Path, log: FigureLog) -> None:
        recipe = self.recipe
        documents = by_length(self.corpus, recipe.shape.tokens)[0]
        batches = Batches(
            self.corpus, documents, recipe.shape, align=self.align, padding=self.config.pad_token_id, seed=recipe.seed
        )
        saved_s = 0.0
        with progress.shown("drafter", step=self.step) as report:
            for batch in batches.batches(self.device):
                share = progress.share(self.step)
                if share >= 1:
                    break
                figures = self.train_step(batch, share)
                if self.step == 1:
                    progress.begin()  # without the compiler's time
                if self.step % recipe.log_steps == 0 or self.step == 1:
                    values = {key: float(value) for key, value in figures.items()}
                    if not math.isfinite(values["loss"]):
                        raise RuntimeError(f"the drafter's loss is {values['loss']} at step {self.step}")
                    values["steps_s"] = (self.step - 1) / max(progress.elapsed_s, 1e-9)
                    log.write({"draft_step": self.step, "elapsed_s": progress.elapsed_s, "share": share, **values})
                    report.note(self.step, progress.steps_likely(self.step), detail=f"loss {values['loss']:.3f}")
                if progress.elapsed_s - saved_s > recipe.save_s:
                    self._report_and_save(progress, out, log)
                    saved_s = progress.elapsed_s
        self._report_and_save(progress, out, log)

    def _report_and_save(self, progress: Progress, out: Path, log: FigureLog) -> None:
        figures = self.evaluate()
        log.write({"draft_step": self.step, "elapsed_s": progress.elapsed_s, **figures})
        drafter = {name: self.tensors[name] for name in parts(self.tensors, self.config)[Part.DRAFT]}
        save_state(out, drafter, {"draft_step": self.step, **figures}, prefix=STATE)

    def train_step(self, batch: Batch, share: float) -> dict[str, Tensor | float]:
        recipe = self.recipe
        self.optimiser.zero_grad()
        judged, counts, loads, imbalance = self._judge(batch, self._anchors(self.step))
        weights = counts * (judged.greedy + recipe.elsewhere * (1 - judged.greedy))
        draft = ((judged.divergence + recipe.choice * judged.choice_loss) * weights).sum() / weights.sum().clamp(min=1)
        reached = counts * judged.greedy * _right_before(judged.right)
        confidence = (judged.confidence_loss * reached).sum() / reached.sum().clamp(min=1)
        (draft + recipe.confidence * confidence + recipe.balance * imbalance).backward()
        norm = self.optimiser.clip(recipe.clip)
        if self.step == 0:
            check_finite({name: part.grad for name, part in self.optimiser.parameters.items() if part.grad is not None})
        scale = rate_scale(share, warm_up=recipe.warm_up, decay=recipe.decay)
        self.optimiser.step(scale)
        balance_experts(self.tensors, loads, recipe.bias_rate * min(1.0, scale * 2))
        self.step += 1
        first = counts[:, 0]
        return {
            "loss": draft.detach(),
            "confidence_loss": confidence.detach(),
            "first_right": (judged.right[:, 0] * first).sum() / first.sum().clamp(min=1),
            "gradient": norm,
            "rate": scale,
        }

    @property
    def align(self) -> int:
        return self.config.group_tokens * self.config.candidate_block_size

    def _anchors(self, number: int) -> Tensor:
        """Places of the rounds [anchors], evenly spread, others each time."""
        tokens, count = self.recipe.shape.tokens, self.recipe.anchors
        stride = (tokens - self.config.dspark_block_size - 1) // count
        return torch.arange(count, device=self.device) * stride + number % stride

    def _judge(self, batch: Batch, anchors: Tensor) -> tuple[Judged, Tensor, dict[str, Tensor], Tensor]:
        """-> judgements, which of them count [G, block], loads and imbalance of the drafter's experts."""
        with torch.no_grad():
            run = self.backbone.forward(self.tensors, batch.ids, batch.documents, Options())
            target = self._target(run, anchors)
        rounds = self.drafting.forward(self.tensors, run, anchors)
        if self.step == 0:
            check_finite({"the backbone's logits": target, "the drafts' logits": rounds.logits})
        places = anchors[:, None] + 1 + torch.arange(self.config.dspark_block_size, device=self.device)
        known = batch.ids[:, places].flatten(0, 1)
        same = batch.documents[:, places] == batch.documents[:, anchors, None]
        counts = (same & batch.targets[:, places]).flatten(0, 1).to(torch.float32).cumprod(dim=1)
        return judge(rounds.logits, target, rounds.confidence, known), counts, rounds.load, rounds.imbalance

    def _target(self, run: Pass, anchors: Tensor) -> Tensor:
        """The backbone's logits [G, block, vocab] of what follows each anchor."""
        places = anchors[:, None] + torch.arange(self.config.dspark_block_size, device=self.device)
        hidden = self.backbone.hidden(self.tensors, run).unflatten(0, run.ids.shape)
        return widen(layers.linear(hidden[:, places].flatten(0, 1), self.tensors["head.weight"]))

    def evaluate(self) -> dict[str, float]:
        """Acceptance by position on held-out text along the backbone's greedy path, by kind of document, and the tokens
        that a round would give. Text leaves the greedy path, so this is below what generation accepts."""
        names = self.valid.kind_names
        block = self.config.dspark_block_size
        sums = torch.zeros(len(names), 2, block, dtype=torch.float64, device=self.device)
        for batch in self._valid_batches():
            anchors = self._anchors(0)
            with torch.no_grad():
                judged, counts, _, _ = self._judge(batch, anchors)
            reached = counts * judged.greedy * _right_before(judged.right)
            values = torch.stack((reached * judged.right, reached), dim=1).double()
            sums.index_add_(0, batch.kinds[:, anchors].flatten(), values)
        shares = {
            f"accepted.{name}": accepted_length(hit, met)
            for name, (hit, met) in zip(names, sums, strict=True)
            if met[0]
        }
        hit, met = sums.sum(dim=0)
        by_place = {f"acceptance.{place}": float(hit[place] / met[place].clamp(min=1)) for place in range(block)}
        return {"accepted": accepted_length(hit, met), **shares, **by_place}

    def _valid_batches(self) -> Iterator[Batch]:
        shape = self.recipe.shape
        documents = by_length(self.valid, shape.tokens)[0]
        layout = Layout(self.valid, documents, tokens=shape.tokens, align=self.align, padding=self.config.pad_token_id)
        return layout.padded_batches(shape.sequences, self.device, most=self.recipe.valid_batches)


def accepted_length(hit: Tensor, met: Tensor) -> float:
    """Tokens of a round, the backbone's own included, from how often each place was right when it was reached."""
    return float(1 + (hit / met.clamp(min=1)).cumprod(dim=0).sum())


def check_finite(values: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError with the names of those that are not finite: a run that starts with them wastes its time."""
    broken = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise RuntimeError(f"not finite in the first step: {', '.join(broken)}")


def _right_before(right: Tensor) -> Tensor:
    """1 where all drafts before were right."""
    return functional.pad(right[:, :-1], (1, 0), value=1.0).cumprod(dim=1)


def as_shipped(name: str, tensor: Tensor) -> Tensor:
    """`tensor` with the precision that the checkpoint keeps of it."""
    wide = ".hc_" in name or name.endswith(("attn_sink", *NOT_TRAINED))
    return tensor if wide else tensor.to(torch.bfloat16).to(tensor.dtype)
