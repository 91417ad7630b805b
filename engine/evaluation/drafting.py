"""What DSpark is worth on this model: drafts that stand, by place; how honest confidences are; tokens a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from whalepod.engine.interface import StepWork
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.engine.speculation.statistics import SpeculationCounts

from .measured_engine import Asked, MeasuredEngine, Note

WARM_TOKENS: Final = 12
"""Of every answer, before speeds are measured."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Some answers, with all drafts verified."""

    counts: SpeculationCounts
    said: int
    """Tokens of all answers, the first of each included."""
    answers: int
    texts: Sequence[Sequence[int]]

    @property
    def accepted_length(self) -> float:
        """Tokens that a request said in a step with drafts, the network's own among them. Drafts behind the end of an
        answer count for nothing, whatever they were."""
        return (self.said - self.answers) / max(1, self.counts.request_steps)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the confidences, over all places."""
        gaps = np.abs(self.counts.bins[..., 1] - self.counts.bins[..., 2]).sum()
        return float(gaps / max(1.0, self.counts.verified.sum()))

    def figures(self) -> Mapping[str, Any]:
        return {
            "accepted_length": round(self.accepted_length, 4),
            "acceptance": [round(value, 4) for value in self.counts.acceptance],
            "calibration_error": round(self.calibration_error, 4),
            "calibration_error_by_place": [round(value, 4) for value in self.counts.calibration_error],
            "request_steps": self.counts.request_steps,
        }


def draft_answers(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    draft_tokens: int,
    calibration: Calibration | None = None,
    note: Note | None = None,
) -> Drafted:
    """Answer all prompts with every draft verified. Calibration changes what confidences say, not what is said."""
    speculation = SpeculationOptions(draft_tokens=draft_tokens, calibration=calibration)
    engine = _engine(model, prompts, sampling, speculation)
    try:
        answers = engine.run(_asked(prompts, sampling), note=note)
    finally:
        engine.close()
    counts = SpeculationCounts(draft_tokens)
    for _, work in engine.steps:
        if work.speculation is not None:
            counts.add(work.speculation, seconds=work.seconds)
    texts = [answer.ids for answer in answers]
    return Drafted(counts, sum(map(len, texts)), len(texts), texts)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of steps that hold rows of answers only."""

    tokens_per_second: float
    """Median over the runs."""
    runs: Sequence[float]


def compare_speeds(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    ways: Mapping[str, SpeculationOptions | None],
    *,
    runs: int,
    slots: int,
    note: Note | None = None,
) -> dict[str, Speed]:
    """The same answers each way, `slots` requests at a time. Ways take turns, so that a machine that slows down slows
    all of them; their beginnings, which come first, do not count."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    short = replace(sampling, max_tokens=WARM_TOKENS)
    for speculation in ways.values():
        engine = _engine(model, prompts, short, speculation, slots=slots)
        try:
            engine.run(_asked(prompts[:slots], short))
        finally:
            engine.close()
    for _ in range(runs):
        for name, speculation in ways.items():
            engine = _engine(model, prompts, sampling, speculation, slots=slots)
            try:
                engine.run(_asked(prompts, sampling), note=note)
                rates[name].append(_decode_rate(engine.steps))
            finally:
                engine.close()
    return {name: Speed(float(np.median(each)), each) for name, each in rates.items()}


def _decode_rate(steps: Iterable[tuple[int, StepWork]]) -> float:
    """Tokens a second."""
    decoding = [(said, work.seconds) for said, work in steps if work.decode_rows and not work.prompt_rows]
    return sum(said for said, _ in decoding) / max(1e-9, sum(seconds for _, seconds in decoding))


def _engine(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    speculation: SpeculationOptions | None,
    *,
    slots: int = 16,
) -> MeasuredEngine:
    assert sampling.max_tokens is not None, "answers have a longest length"
    context = max(map(len, prompts)) + sampling.max_tokens
    return MeasuredEngine(model, context_tokens=context, slots=min(slots, len(prompts)), speculation=speculation)


def _asked(prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Asked]:
    return [Asked(prompt, sampling) for prompt in prompts]
