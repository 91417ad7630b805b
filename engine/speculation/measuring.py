"""Runs one engine to measure it: what steps cost, how honest the confidences are, what drafts are worth.

Whatever is measured is measured with the engine that serves, on prompts that are given or random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from random import Random
from typing import Final

import numpy as np

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.interface import EngineRequest, Fidelity, FinishedEvent, StepWork, TokensEvent
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams

from .calibration import Calibration, calibrate
from .cost_table import CostTable, MeasuredStep, fit_cost
from .options import SpeculationOptions
from .statistics import SpeculationCounts, SpeculationWork

TIMEOUT_S: Final = 3600.0
FRACTIONS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of all drafts that a step could verify."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Run:
    """What came of some requests."""

    tokens: int = 0
    seconds: float = 0.0
    works: list[StepWork] = field(default_factory=list[StepWork])

    @property
    def speculation(self) -> list[SpeculationWork]:
        return [work.speculation for work in self.works if work.speculation is not None]

    def counts(self, columns: int) -> SpeculationCounts:
        counts = SpeculationCounts(columns)
        for work in self.works:
            if work.speculation is not None:
                counts.add(work.speculation, seconds=work.seconds)
        return counts


def random_prompts(model: RankModel, count: int, *, tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Of ordinary tokens."""
    rng, config = Random(seed), model.config
    never = {config.bos_token_id, config.eos_token_id, config.image_token_id, config.dspark_noise_token_id}
    ordinary = [token for token in range(3, config.vocab_size) if token not in never]
    return [tuple(rng.choices(ordinary, k=tokens)) for _ in range(count)]


def run_requests(
    model: RankModel,
    options: RankOptions,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> Run:
    """All prompts at once. Raises the first error that one of them ends with."""
    deliveries: SimpleQueue[Delivery] = SimpleQueue()
    engine = Engine(model, options, store=None, deliver=deliveries.put, clock=clock)
    run = Run()
    try:
        for index, prompt in enumerate(prompts):
            engine.submit(_request(index, prompt, sampling))
        started_s = clock.monotonic_s()
        while engine.runnable:
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    run.tokens += len(event.tokens)
                elif isinstance(event, FinishedEvent) and event.error is not None:
                    raise event.error
            run.works += engine.take_works()
        run.seconds = clock.monotonic_s() - started_s
    finally:
        engine.close()
    return run


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Steps of 1, 2, 4 … `requests_max` requests, each with five shares of their drafts verified."""

    requests_max: int
    draft_tokens: int
    steps: int = 32
    """That count, of each kind; a quarter as many go before, to warm up."""
    prompt_tokens: int = 32
    hardware: str = ""
    seed: int = 0


def measure_cost(model: RankModel, plan: CostPlan, *, say: Say) -> CostTable:
    """Raises ConfigError if the model cannot draft like this."""
    cells: list[MeasuredStep] = []
    for requests in _doubling(plan.requests_max):
        for fraction in FRACTIONS:
            budget = int(fraction * requests * plan.draft_tokens)
            steps = _measured_steps(model, plan, requests, budget)
            cell = MeasuredStep(
                requests,
                requests + budget,
                float(np.median([step.seconds for step in steps])),
                float(np.median([step.draft_seconds for step in steps])),
            )
            say(
                f"{requests:4} requests, {cell.rows:5} rows: {cell.seconds * 1000:8.2f} ms a step "
                f"and {cell.draft_seconds * 1000:.2f} ms of drafting (median of {len(steps)})"
            )
            cells.append(cell)
    table = fit_cost(
        cells, model=model.weights, layout="one rank", hardware=plan.hardware, draft_tokens=plan.draft_tokens
    )
    seconds = np.array([cell.seconds for cell in cells])
    spread = float(np.std(seconds))
    explained = 1 - (table.rms_seconds / spread) ** 2 if spread else 1.0
    say(f"fit: rms {table.rms_seconds * 1000:.2f} ms, R² {explained:.4f}")
    return table


def _measured_steps(model: RankModel, plan: CostPlan, requests: int, budget: int) -> list[MeasuredStep]:
    """Steps in which every request is there and the budget was met. No draft stands, so that the batch stays."""
    warm = plan.steps // 4
    answer = plan.steps + warm + 4
    speculation = SpeculationOptions(draft_tokens=plan.draft_tokens, forced_budget=budget, simulated_acceptance=0.0)
    context = plan.prompt_tokens + answer + plan.draft_tokens + 1
    options = RankOptions(
        slots=requests,
        blocks=requests * model.boundaries.blocks(context) + 2,
        chunk_tokens=max(plan.prompt_tokens * requests, 2),
        context_tokens_max=context,
        speculation=speculation,
        async_scheduling=False,
    )
    prompts = random_prompts(model, requests, tokens=plan.prompt_tokens, seed=plan.seed)
    sampling = SamplingParams(temperature=1.0, seed=plan.seed, max_tokens=answer, ignore_eos=True)
    whole = [
        MeasuredStep(
            requests, work.decode_rows, work.seconds - work.speculation.draft_seconds, work.speculation.draft_seconds
        )
        for work in run_requests(model, options, prompts, sampling).works
        if work.speculation is not None and len(work.speculation.requests) == requests and not work.prompt_rows
    ]
    return [step for step in whole[warm:] if step.rows == requests + budget]


def collect_calibration(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    draft_tokens: int,
    slots: int,
    say: Say,
) -> Calibration:
    """Every draft is verified, none is trimmed, and no temperatures are loaded. Raises ConfigError if the model cannot
    draft like this, or too few steps verify all drafts."""
    options = _options(model, prompts, sampling, slots, SpeculationOptions(draft_tokens=draft_tokens))
    run = run_requests(model, options, prompts, sampling)
    odds: list[np.ndarray] = []
    accepted: list[int] = []
    for work in run.speculation:
        for request in work.requests:
            if request.verified == draft_tokens and request.log_odds is not None:
                odds.append(request.log_odds)
                accepted.append(request.accepted)
    say(f"{run.tokens} tokens, {len(odds)} steps of requests with {draft_tokens} drafts verified")
    if not odds:
        odds = [np.zeros(draft_tokens)]
        accepted = [0]
    return calibrate(np.stack(odds), np.array(accepted), model=model.weights)


@dataclass(frozen=True, slots=True)
class Compared:
    """The same requests with one way to speculate, or none."""

    name: str
    tokens_per_second: float
    counts: SpeculationCounts | None


def compare_ways(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    ways: Sequence[tuple[str, SpeculationOptions | None]],
    *,
    slots: int,
    repeats: int = 1,
) -> list[Compared]:
    """All ways take turns, so that a machine that slows down slows all of them; the fastest of each counts."""
    best: dict[str, tuple[float, Run]] = {}
    for _ in range(repeats):
        for name, speculation in ways:
            run = run_requests(model, _options(model, prompts, sampling, slots, speculation), prompts, sampling)
            rate = run.tokens / run.seconds
            if name not in best or rate > best[name][0]:
                best[name] = rate, run
    return [
        Compared(name, best[name][0], None if way is None else best[name][1].counts(way.draft_tokens))
        for name, way in ways
    ]


def _options(
    model: RankModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    slots: int,
    speculation: SpeculationOptions | None,
) -> RankOptions:
    assert sampling.max_tokens is not None
    context = max(map(len, prompts)) + sampling.max_tokens + 1
    return RankOptions(
        slots=slots,
        blocks=slots * model.boundaries.blocks(context) + 2,
        context_tokens_max=context,
        speculation=speculation,
    )


def _request(index: int, prompt: Sequence[int], sampling: SamplingParams) -> EngineRequest:
    seed = None if sampling.seed is None else sampling.seed + index
    return EngineRequest(
        request_id=RequestId(f"measured {index}".encode().ljust(16)),
        attempt=1,
        prompt_ids=prompt,
        sampling=replace(sampling, seed=seed),
        fidelity=Fidelity.FAST,
        deadline=Deadline.after(TIMEOUT_S),
    )


def _doubling(most: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return sorted({*counts, most})
