"""Does `exact` keep its promise? The same requests under random schedules must say the same, bit for bit.

requests ──▶ alone, one after another ──▶ what is right
         ──▶ schedule: arrivals, neighbours that are dropped, chunk sizes, drafts, pools that force preemption
         ──▶ the same?

Two controls show that the check can fail: logits that depend a little on the rows beside them, as those of a kernel
that is not batch-invariant do, must be seen, and a request whose seed is changed must change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.model.draft import Anchor, Chooser, Drafts

from .device import LaunchedRows
from .engine import Delivery, Engine
from .interface import EngineRequest, Fidelity, FinishedEvent, SampledToken, TokensEvent
from .options import RankOptions
from .rank_model import RankModel
from .runner import StepRunner, on_host
from .sampling_params import SamplingParams
from .speculation.cost_table import CostTable
from .speculation.options import SpeculationOptions, Verification

TIMEOUT_S: Final = 3600.0
LEAK: Final = np.float32(2**-20)
"""How much of a logit the control adds for each row of the step: a few last places."""
NEIGHBOUR_TOKENS_MORE: Final = 8
"""A neighbour's prompt is a request's and some more."""

Answer = tuple[SampledToken, ...]
"""Tokens and log-probabilities. Equal means equal bits: no engine reports NaN."""


@dataclass(frozen=True, slots=True)
class DeterminismPlan:
    """The same seed makes the same requests and schedules."""

    schedules: int = 20
    requests: int = 6
    answer_tokens: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Half of them are greedy, and some begin alike."""

    name: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """`cancel_after`: steps after which a neighbour is dropped; None: it is one of the requests that are compared."""

    step: int
    case: Case
    cancel_after: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    options: RankOptions
    arrivals: tuple[Arrival, ...]
    """By step."""


@dataclass(slots=True)
class DeterminismReport:
    schedules: int = 0
    different: int = 0
    """Answers that differ from what is right, over all schedules."""
    dropped: int = 0
    preempted: int = 0
    control_seen: bool = False
    """Logits that depend on their neighbours were noticed."""
    seed_changed_own: bool = False
    seed_changed_others: int = 0
    details: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        return (
            self.schedules > 0
            and self.different == 0
            and self.control_seen
            and self.seed_changed_own
            and self.seed_changed_others == 0
        )

    def figures(self) -> dict[str, object]:
        return {
            "schedules": self.schedules,
            "different": self.different,
            "preempted": self.preempted,
            "dropped": self.dropped,
            "control_seen": self.control_seen,
            "seed_changed_own": self.seed_changed_own,
            "seed_changed_others": self.seed_changed_others,
            "passed": self.passed,
        }


def check_determinism(
    model: RankModel, plan: DeterminismPlan, *, say: Callable[[str], None] = lambda _: None
) -> DeterminismReport:
    """Run every schedule over `model`, then the controls. Errors of a request are raised."""
    assert plan.requests > 1
    assert plan.answer_tokens > 1
    rng, report = Random(plan.seed), DeterminismReport()
    cases = make_cases(model, plan, rng)
    right = {case.name: _alone(model, case) for case in cases}
    for index in range(plan.schedules):
        run = run_schedule(model, make_schedule(model, plan, cases, rng))
        wrong = [name for name, answer in right.items() if run.answers[name] != answer]
        report.schedules += 1
        report.different += len(wrong)
        report.preempted += run.preempted
        report.dropped += run.dropped
        report.details += [f"schedule {index}: {name} differs" for name in wrong]
        say(f"schedule {index + 1} of {plan.schedules}: {len(wrong)} of {len(cases)} answers differ")
    together = Schedule(_options(model, plan), tuple(Arrival(0, case) for case in cases))
    report.control_seen = run_schedule(model, together, instrument=LeakyRunner).answers != right
    _check_seed(model, together, right, report)
    return report


def _check_seed(model: RankModel, together: Schedule, right: Mapping[str, Answer], report: DeterminismReport) -> None:
    """Another seed for one of the requests."""
    chosen = next(arrival for arrival in together.arrivals if not arrival.case.sampling.greedy)
    case = chosen.case
    assert case.sampling.seed is not None
    changed = replace(case, sampling=replace(case.sampling, seed=case.sampling.seed + 1))
    arrivals = tuple(replace(each, case=changed) if each is chosen else each for each in together.arrivals)
    answers = run_schedule(model, replace(together, arrivals=arrivals)).answers
    report.seed_changed_own = answers[case.name] != right[case.name]
    report.seed_changed_others = sum(answers[name] != right[name] for name in right if name != case.name)


def make_cases(model: RankModel, plan: DeterminismPlan, rng: Random) -> tuple[Case, ...]:
    """Prompts of up to the kept rows and two blocks, every third with the beginning of the one before it. Most end
    so shortly before a block border that the answer needs another block."""
    longest = _longest_prompt(model)
    cases: list[Case] = []
    for index in range(plan.requests):
        shared = cases[-1].prompt_ids[: longest // 2] if index % 3 == 2 else ()
        length = rng.randint(len(shared) + 1, longest)
        if rng.random() < 0.8:
            length = model.boundaries.blocks(length) * model.block_tokens - rng.randrange(2)
        prompt = (*shared, *(rng.randrange(3, model.config.vocab_size) for _ in range(length - len(shared))))
        sampling = SamplingParams(
            temperature=index % 2 and rng.choice((0.7, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.95)),
            top_k=rng.choice((-1, 40)),
            presence_penalty=rng.choice((0.0, 0.5)),
            seed=rng.randrange(2**62),
            max_tokens=plan.answer_tokens,
            ignore_eos=True,
            logprobs=2,
        )
        cases.append(Case(f"case {index}", prompt, sampling))
    return tuple(cases)


def make_schedule(model: RankModel, plan: DeterminismPlan, cases: Ordered[Case], rng: Random) -> Schedule:
    """Everything that must not matter, at random."""
    arrivals = [Arrival(rng.randrange(plan.answer_tokens // 2), case) for case in cases]
    for index in range(rng.randrange(1, 4)):
        beside = rng.choice(cases)
        prompt = (*beside.prompt_ids, *[3] * rng.randrange(1, NEIGHBOUR_TOKENS_MORE + 1))
        neighbour = replace(beside, name=f"neighbour {index}", prompt_ids=prompt)
        arrivals.append(Arrival(rng.randrange(plan.answer_tokens // 2), neighbour, cancel_after=rng.randrange(1, 10)))
    rng.shuffle(arrivals)
    arrivals.sort(key=lambda arrival: arrival.step)
    options = replace(
        _options(model, plan),
        slots=rng.randint(3, plan.requests + 1),
        blocks=_tight_blocks(model, plan, cases, rng),
        chunk_tokens=max(model.config.group_tokens, rng.choice((7, 16, 64, 512))),
        chunk_tokens_beside_decode=max(model.config.group_tokens, rng.choice((4, 9, 32))),
        prefix_reuse=rng.random() < 0.7,
        parked_bytes=rng.choice((0, 1 << 30)),
        async_scheduling=rng.random() < 0.7,
        speculation=_speculation(model, rng),
    )
    return Schedule(options, tuple(arrivals))


def _speculation(model: RankModel, rng: Random) -> SpeculationOptions | None:
    """No drafts, or up to so many in a step, of which all are verified or those that pay at a made-up cost."""
    draft_tokens = rng.randint(0, model.config.dspark_block_size) if model.network.drafter is not None else 0
    if not draft_tokens:
        return None
    verification = rng.choice(list(Verification)) if model.config.enable_confidence_head else Verification.FIXED
    rows = [(1, 0.0), (4, rng.uniform(0, 1)), (1000, rng.uniform(1, 300))]
    cost = CostTable(bias=1.0, requests=[(1, 0.0)], rows=rows, draft=[(1, 0.0)])
    return SpeculationOptions(draft_tokens=draft_tokens, verification=verification, cost=cost, gain_min=0.0)


def _tight_blocks(model: RankModel, plan: DeterminismPlan, cases: Ordered[Case], rng: Random) -> int:
    """Room for some prompts and the block that admission leaves free: too little for their answers."""
    alone, blocks = _blocks_alone(model, plan), 1
    for count, case in enumerate(rng.sample(cases, len(cases))):
        if count >= 2 and blocks >= alone:
            break
        blocks += model.boundaries.blocks(len(case.prompt_ids))
    return max(blocks, alone)


@dataclass(slots=True)
class ScheduleRun:
    """What came of one schedule."""

    answers: dict[str, Answer]
    preempted: int = 0
    dropped: int = 0


def run_schedule(
    model: RankModel, schedule: Schedule, *, instrument: Callable[[StepRunner], StepRunner] | None = None
) -> ScheduleRun:
    """Answers of all requests that were not dropped, by name. Raises the first error that a request ends with."""
    answers: SimpleQueue[Delivery] = SimpleQueue()
    engine = Engine(model, schedule.options, store=None, deliver=answers.put, instrument=instrument)
    run = _Running(engine, model, schedule)
    for _ in run.steps():
        engine.check()
    engine.close()
    told = {name: tuple(tokens) for name, tokens in run.told.items() if name not in run.dropped}
    return ScheduleRun(told, preempted=engine.preempted, dropped=len(run.dropped))


class _Running:
    """A schedule while it runs."""

    def __init__(self, engine: Engine, model: RankModel, schedule: Schedule) -> None:
        self._engine = engine
        self._model = model
        self._arrivals = schedule.arrivals
        self.told: dict[str, list[SampledToken]] = {}
        self.dropped: set[str] = set()

    def steps(self) -> Iterator[int]:
        """Step until everything has arrived and ended."""
        step, last = 0, max(arrival.step + (arrival.cancel_after or 0) for arrival in self._arrivals)
        while step <= last or self._engine.runnable:
            for arrival in self._arrivals:
                self._meet(arrival, step)
            for event in self._engine.step():
                self._note(event)
            yield step
            step += 1

    def _meet(self, arrival: Arrival, step: int) -> None:
        name = arrival.case.name
        if arrival.step == step:
            self.told[name] = []
            self._engine.submit(_request(self._model, arrival.case))
        if arrival.cancel_after is not None and arrival.step + arrival.cancel_after == step:
            self.dropped.add(name)
            self._engine.cancel(_id_of(name), 1)

    def _note(self, event: object) -> None:
        match event:
            case TokensEvent():
                name = event.request_id.decode().strip()
                assert name not in self.dropped, "a dropped request was heard of"
                self.told[name] += event.tokens
            case FinishedEvent(error=error) if error is not None:
                raise error
            case _:
                pass


class LeakyRunner:
    """The control: a row's logits depend on how many rows are computed beside it, by a few last places."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def run(self, rows: Ordered[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        factor = np.float32(1) + LEAK * np.float32(len(rows) - 1)
        return [None if logits is None else on_host(logits) * factor for logits in self._runner.run(rows)]

    def draft(self, anchors: Ordered[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self._runner.draft(anchors, choose, tokens)


def _alone(model: RankModel, case: Case) -> Answer:
    """On a cold engine, the prompt in one chunk."""
    options = RankOptions(slots=1, chunk_tokens=len(case.prompt_ids) + 1, prefix_reuse=False)
    options = replace(options, chunk_tokens=max(options.chunk_tokens, model.config.group_tokens))
    return run_schedule(model, Schedule(options, (Arrival(0, case),))).answers[case.name]


def _request(model: RankModel, case: Case) -> EngineRequest:
    root = chain_root(model.namespace, salt=b"")
    return EngineRequest(
        request_id=_id_of(case.name),
        attempt=1,
        prompt_ids=case.prompt_ids,
        sampling=case.sampling,
        fidelity=Fidelity.EXACT,
        deadline=Deadline.after(TIMEOUT_S),
        chain_root=root,
        block_hashes=derive_block_hashes(case.prompt_ids, root=root, block_tokens=model.block_tokens),
    )


def _id_of(name: str) -> RequestId:
    return RequestId(name.encode().ljust(16))


def _options(model: RankModel, plan: DeterminismPlan) -> RankOptions:
    blocks = plan.requests * _blocks_alone(model, plan)
    return RankOptions(slots=plan.requests, blocks=blocks, context_tokens_max=_context(model, plan))


def _longest_prompt(model: RankModel) -> int:
    return model.boundaries.blocks(model.config.kept_rows + 2 * model.block_tokens) * model.block_tokens


def _context(model: RankModel, plan: DeterminismPlan) -> int:
    """The longest that any request may become."""
    return _longest_prompt(model) + NEIGHBOUR_TOKENS_MORE + plan.answer_tokens


def _blocks_alone(model: RankModel, plan: DeterminismPlan) -> int:
    return model.boundaries.blocks(_context(model, plan))
