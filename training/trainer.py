"""Trains the backbone: everything but the drafter, which learns afterwards from what this leaves.

corpus ─ Batches ─▶ Backbone.forward ─▶ losses ─▶ Optimiser.step ─▶ routing biases ─▶ state on disk
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import widen
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import Part

from . import layers
from .backbone import INDEX_LOSS_STRIDE, Backbone, Options, Pass
from .batches import Batch, Batches, Corpus, Layout, Shape, by_length
from .compiling import compiled_on_gpu
from .optimiser import Optimiser, Rates, rate_scale
from .parameters import first_tensors, parts, stacked
from .progress import FigureLog, Progress
from .states import load_meta, load_state, narrowed, save_state

NOT_TRAINED = ("gate.bias", "gate.bias_vl")
"""Moved by how loaded the experts are, not by gradients."""
STATE, OPTIMISER = "model", "optimiser"
SHORT, LONG = Shape(sequences=64, tokens=1024), Shape(sequences=16, tokens=4096)
RATES = Rates(muon=0.006, adam=0.003, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run of the backbone is made of."""

    short: Shape = SHORT
    long: Shape = LONG
    """Documents longer than a short sequence train in long ones, in the share of the tokens that they are; without
    sequences, not at all."""
    rates: Rates = RATES
    warm_up: float = 0.02
    """Share of the run."""
    decay: float = 0.6
    dense: float = 0.08
    """Share of the run, from its start, in which rows attend to every entry that they see."""
    balance: float = 1e-3
    """Weight of the loss that keeps experts equally likely."""
    bias_rate: float = 1e-3
    """Step of the routing biases, towards equal load."""
    clip: float = 1.0
    seed: int = 0
    log_steps: int = 20
    save_s: float = 150.0
    valid_batches: int = 3
    """Batches of each shape whose loss is measured at every save, at most."""


@compiled_on_gpu
def token_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """hidden [rows, D], labels [rows] -> cross-entropy [rows], float32 at least."""
    return functional.cross_entropy(widen(layers.linear(hidden, head)), labels, reduction="none")


@dataclass(slots=True)
class Trainer:
    config: ModelConfig
    corpus: Corpus
    valid: Corpus
    recipe: Recipe
    backbone: Backbone
    tensors: dict[str, Tensor]
    """By stacked name, float32, the whole model."""
    device: torch.device
    step: int = 0
    tokens: int = 0
    optimiser: Optimiser = field(init=False)

    def __post_init__(self) -> None:
        text = parts(self.tensors, self.config)[Part.TEXT]
        trained = {name: self.tensors[name] for name in text if not name.endswith(NOT_TRAINED)}
        for tensor in trained.values():
            tensor.requires_grad_(True)
        self.optimiser = Optimiser(trained, self.recipe.rates)

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        token_map: Tensor,
        corpus: Corpus,
        valid: Corpus,
        *,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Trainer:
        tensors = stacked(first_tensors(config, seed=recipe.seed))
        return cls(
            config=config,
            corpus=corpus,
            valid=valid,
            recipe=recipe,
            backbone=Backbone(config, token_map, dtype=dtype, device=device),
            tensors={name: tensor.to(device) for name, tensor in tensors.items()},
            device=device,
        )

    def resume(self, directory: Path) -> None:
        """Go on from what `save` left."""
        for name, tensor in load_state(directory, prefix=STATE).items():
            self.tensors[name].data.copy_(tensor)
        self.optimiser.load(load_state(directory, prefix=OPTIMISER))
        meta = load_meta(directory)
        self.step, self.tokens = meta["step"], meta["tokens"]

    def run(self, progress: Progress, out: Path, log: FigureLog) -> None:
        saved_s = progress.elapsed_s
        logged_s, logged_tokens = saved_s, self.tokens
        with progress.shown("backbone", step=self.step) as report:
            for batch in self._batches():
                share = progress.share(self.step)
                if share >= 1 or self.step >= progress.steps:
                    break
                figures = self.train_step(batch, share)
                if self.step % self.recipe.log_steps == 0:
                    values = {key: float(value) for key, value in figures.items()}
                    now_s = progress.elapsed_s
                    values["tokens_s"] = (self.tokens - logged_tokens) / max(now_s - logged_s, 1e-9)
                    log.write({"step": self.step, "tokens": self.tokens, "elapsed_s": now_s, "share": share, **values})
                    report.note(self.step, progress.steps_likely(self.step), detail=f"loss {values['loss']:.3f}")
                    logged_s, logged_tokens = now_s, self.tokens
                    if not math.isfinite(values["loss"]):
                        raise RuntimeError(f"the loss is {values['loss']} at step {self.step}")
                if progress.elapsed_s - saved_s > self.recipe.save_s:
                    self._report_and_save(progress, out, log)
                    saved_s = progress.elapsed_s
        self._report_and_save(progress, out, log)

    def train_step(self, batch: Batch, share: float) -> dict[str, Tensor | float]:
        """One update from one batch, at `share` of the run."""
        recipe = self.recipe
        options = Options(select=share >= recipe.dense, index_loss=True, offset=self.step % INDEX_LOSS_STRIDE)
        self.optimiser.zero_grad()
        run, losses, counts = self._losses(batch, options)
        language = (losses * counts).sum() / counts.sum().clamp(min=1)
        imbalance = torch.stack(run.imbalances).sum()
        index = torch.stack(run.index_losses).sum()
        (language + index + recipe.balance * imbalance).backward()
        norm = self.optimiser.clip(recipe.clip)
        scale = rate_scale(share, warm_up=recipe.warm_up, decay=recipe.decay)
        self.optimiser.step(scale)
        balance_experts(self.tensors, run.loads, recipe.bias_rate * min(1.0, scale * 2))
        self.step += 1
        self.tokens += batch.ids.numel()
        return {
            "loss": language.detach(),
            "index_loss": index.detach(),
            "imbalance": imbalance.detach() / len(run.imbalances),
            "gradient": norm,
            "rate": scale,
        }

    def _losses(self, batch: Batch, options: Options) -> tuple[Pass, Tensor, Tensor]:
        """Loss of every row [B · T], and whether it counts."""
        run = self.backbone.forward(self.tensors, batch.ids, batch.documents, options)
        labels, counts = batch.labels()
        hidden = self.backbone.hidden(self.tensors, run)
        return run, token_losses(hidden, self.tensors["head.weight"], labels.flatten()), counts.flatten()

    def _batches(self) -> Iterator[Batch]:
        """Of short and long documents in turn, each in its share of the corpus."""
        recipe = self.recipe
        sources: list[Iterator[Batch]] = []
        shares: list[float] = []
        groups = by_length(self.corpus, recipe.short.tokens)
        for documents, shape in zip(groups, (recipe.short, recipe.long), strict=True):
            tokens = int(self.corpus.lengths[documents].sum())
            if shape.sequences and tokens >= 2 * shape.sequences * shape.tokens:
                batches = Batches(
                    self.corpus,
                    documents,
                    shape,
                    align=self.align,
                    padding=self.config.pad_token_id,
                    seed=recipe.seed,
                )
                sources.append(batches.batches(self.device))
                shares.append(float(tokens))
        assert sources, "the corpus does not fill a batch"
        owed = [0.0] * len(sources)
        while True:
            owed = [debt + share / sum(shares) for debt, share in zip(owed, shares, strict=True)]
            most = max(range(len(sources)), key=lambda source: owed[source])
            owed[most] -= 1
            yield next(sources[most])

    @property
    def align(self) -> int:
        """Documents start where groups and candidate blocks do."""
        return self.config.group_tokens * self.config.candidate_block_size

    def evaluate(self) -> dict[str, float]:
        """Mean loss of held-out tokens, in all and by kind. Computes gradients' graphs, which a compiled forward has
        anyway, and drops them."""
        sums = torch.zeros(2, len(self.valid.kind_names), device=self.device, dtype=torch.float64)
        recipe = self.recipe
        for documents, shape in zip(
            by_length(self.valid, recipe.short.tokens), (recipe.short, recipe.long), strict=True
        ):
            if not shape.sequences:
                continue
            layout = Layout(
                self.valid, documents, tokens=shape.tokens, align=self.align, padding=self.config.pad_token_id
            )
            for batch in layout.padded_batches(shape.sequences, self.device, most=recipe.valid_batches):
                _, losses, counts = self._losses(batch, Options(index_loss=True))
                values = torch.stack((losses.detach().double() * counts, counts.double()))
                sums.index_add_(1, batch.kinds.flatten(), values)
        found = {
            f"valid.{kind}": float(loss / count)
            for kind, loss, count in zip(self.valid.kind_names, *sums, strict=True)
            if count
        }
        return {"valid": float(sums[0].sum() / sums[1].sum().clamp(min=1)), **found}

    def _report_and_save(self, progress: Progress, out: Path, log: FigureLog) -> None:
        figures = self.evaluate()
        log.write({"step": self.step, "tokens": self.tokens, "elapsed_s": progress.elapsed_s, **figures})
        self.save(out, figures)

    def save(self, directory: Path, figures: Mapping[str, Any]) -> None:
        meta = {"step": self.step, "tokens": self.tokens, **figures}
        save_state(directory, self.tensors, meta, prefix=STATE)
        save_state(directory, narrowed(self.optimiser.state()), meta, prefix=OPTIMISER)


@torch.no_grad()
def balance_experts(tensors: Mapping[str, Tensor], loads: Mapping[str, Tensor], rate: float) -> None:
    """Experts that too many rows chose become less likely by `rate`, the others more; images' rows follow."""
    for name, load in loads.items():
        tensors[name].add_(torch.sign(load.mean() - load), alpha=rate)
        tensors[f"{name}_vl"].copy_(tensors[name])
