"""How likely the model finds text that it never saw.

Whole documents are scored with every row through every layer (mode `off`), like the rows of a training step. What
serving approximates is scored where it happens: in answers that follow a prompt.

    document   |── prompt 1 ──|answer|── more ──|answer|── more ──|answer|
    turn 2      found again up to R ────────▶ replayed ▶ computed |scored|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whalepod.engine.interface import Fidelity
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams

from .held_out import Document
from .measured_engine import Asked, MeasuredEngine, Note

NAT_BITS = 1 / math.log(2)


@dataclass(slots=True)
class Loss:
    """Of some text. Adds up."""

    nats: float = 0.0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, scores: Sequence[float], *, text_bytes: int = 0) -> None:
        """`scores`: natural logarithms of chances."""
        self.nats -= math.fsum(scores)
        self.tokens += len(scores)
        self.text_bytes += text_bytes

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(1, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats * NAT_BITS / max(1, self.text_bytes)

    def cost_over(self, other: Loss) -> float:
        """How much higher this loss is than `other` of the same tokens: 0.01 is one percent."""
        assert self.tokens == other.tokens, "losses of different text do not compare"
        return self.nats / other.nats - 1 if other.nats else 0.0


def document_scores(model: RankModel, documents: Sequence[Document], *, note: Note | None = None) -> list[list[float]]:
    """Natural logarithms of the chances of each document's scored tokens. Mode `off`."""
    if not documents:
        return []
    engine = MeasuredEngine(model, context_tokens=max(len(document.ids) for document in documents) + 1)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    try:
        answers = engine.run([Asked(each.ids, scored) for each in documents], note=note)
        # The first score is that of the second token.
        return [
            [answer.prompt[place - 1] for place in each.places] for each, answer in zip(documents, answers, strict=True)
        ]
    finally:
        engine.close()


def losses_by_kind(documents: Sequence[Document], scores: Sequence[Sequence[float]]) -> dict[str, Loss]:
    """In the order in which kinds come; `all` is the last."""
    losses: dict[str, Loss] = {}
    whole = Loss()
    for document, values in zip(documents, scores, strict=True):
        for loss in (losses.setdefault(document.kind, Loss()), whole):
            loss.add(values, text_bytes=document.text_bytes)
    return {**losses, "all": whole}


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Where the prompts of a document's turns end. The first turn finds nothing; every later one finds a prefix."""

    first_tokens: int
    answer_tokens: int
    gap_tokens: int
    """Between an answer and the end of the next prompt."""
    turns_max: int

    @classmethod
    def of(cls, model: RankModel, *, answer_tokens: int, turns_max: int) -> TurnPlan:
        """A hit leaves at least K rows to compute, so the first prompt has a block beside those. Prompts end at all
        offsets from a block border."""
        block = model.block_tokens
        return cls(
            first_tokens=model.config.kept_rows + block + 1,
            answer_tokens=answer_tokens,
            gap_tokens=block // 2 + 5,
            turns_max=turns_max,
        )

    def prompt_ends(self, tokens: int) -> list[int]:
        """L of each turn of a document with so many tokens; fewer than two are none."""
        step = self.answer_tokens + self.gap_tokens
        ends = range(self.first_tokens, tokens - self.answer_tokens + 1, step)
        return list(ends[: self.turns_max]) if len(ends) > 1 else []


@dataclass(frozen=True, slots=True)
class TurnScores:
    """Of all turns but the first, by turn."""

    scores: Sequence[Sequence[float]]
    prompts: int
    found: int
    """Prompts of which a prefix was found."""
    replayed_tokens: int
    """Rows that were computed again for that, in all."""

    @property
    def loss(self) -> Loss:
        loss = Loss()
        for values in self.scores:
            loss.add(values)
        return loss


def turn_scores(
    model: RankModel,
    documents: Sequence[Document],
    plan: TurnPlan,
    *,
    fidelity: Fidelity = Fidelity.FAST,
    reuse: bool = True,
    every_row: bool = False,
    note: Note | None = None,
) -> TurnScores:
    """Answers of all turns but the first. `reuse`: prompts start from the blocks that the turn before left.
    `every_row`: mode `off`, which uses no stored prefix."""
    ends = [plan.prompt_ends(len(document.ids)) for document in documents]
    kept = sum(len(each.ids) for each, its_ends in zip(documents, ends, strict=True) if its_ends)
    longest = max((its_ends[-1] for its_ends in ends if its_ends), default=0)
    engine = MeasuredEngine(
        model, context_tokens=longest + plan.answer_tokens, reuse=reuse and not every_row, stored_tokens=kept
    )
    sampling = SamplingParams(temperature=0, prompt_logprobs=0 if every_row else None)
    scores: list[list[float]] = []
    prompts = found = replayed = 0
    try:
        for turn in range(max(map(len, ends), default=0)):
            asked = [
                Asked(
                    document.ids[:end], sampling, said=document.ids[end : end + plan.answer_tokens], fidelity=fidelity
                )
                for document, its_ends in zip(documents, ends, strict=True)
                for end in its_ends[turn : turn + 1]
            ]
            answers = engine.run(asked, note=note)
            if turn:
                scores.append([score for answer in answers for score in answer.said])
                prompts += len(answers)
                found += sum(answer.cached_tokens > 0 for answer in answers)
                replayed += sum(answer.replayed_tokens for answer in answers)
    finally:
        engine.close()
    return TurnScores(scores, prompts, found, replayed)


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Of `Loss.cost_over` of two scorings of the same tokens: how far chance alone moves it, tokens taken as
    independent."""
    if len(one) < 2:
        return 0.0
    differences = np.subtract(other, one)
    return float(np.std(differences, ddof=1) * math.sqrt(len(one)) / max(1e-12, -math.fsum(other)))
