"""Where the rows of a step are computed and its tokens drawn: on a thread of its own, in the order of the launches.

    host     launch(n + 1) ── wait for n ── plan n + 2 ──▶
    device   ── draft(n) ─ forward(n) ─ draw(n) ─ draft(n + 1) ─ forward(n + 1) ─ draw(n + 1) ──▶

How many tokens a request says in a step is known only here, and so is where its next rows begin: the device reads both
from its relay, not from the host. Tokens under a grammar are drawn when the host, which has seen the tokens before
them and the drafts of this step, says what may follow; only the drawing waits for that, not the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whalepod.core.clock import Clock
from whalepod.core.errors import ServingError
from whalepod.model.batch import Segment
from whalepod.model.draft import Anchor

from .block_pool import Slot
from .grammar.masks import Flags
from .host_copies import Mark
from .interface import SampledToken, StepWork
from .runner import LogitsOrError, RowLogits, StepRunner, run_isolated
from .sequence import Sequence
from .speculation.acceptance import Hearing, Said, judge_isolated
from .speculation.budget import Holder
from .speculation.speculator import Candidate, Proposal, Round, Speculator

UNKNOWN_ID = -1
"""Stands where the device puts the token that it drew in the step before."""


class LaunchedRows(NamedTuple):
    """Rows of one sequence in a launched step. Of the sequence, the device uses the sampler and `entrusted`, which are
    its own while rows are launched, and what does not change meanwhile."""

    sequence: Sequence
    slot: Slot
    segment: Segment
    draws: bool
    """Tokens are drawn after the last row, unless only the hand-off is due."""
    guided: bool
    """They are drawn under a grammar."""
    drafts_max: int = 0
    """Drafts that may be verified behind its row, if there is something to say that long."""
    draft_start: int = 0
    """Of draft window rows, those from here on are there."""

    @property
    def relayed(self) -> bool:
        return self.segment.token_ids[0] == UNKNOWN_ID

    @property
    def drafts_room(self) -> int:
        """Drafts that could still be said. Its last row is that of its last token."""
        return min(self.drafts_max, self.sequence.tokens_max - self.segment.end - 1)

    def with_drafts(self, drafts: Ordered[int]) -> LaunchedRows:
        segment = self.segment._replace(token_ids=(*self.segment.token_ids, *drafts))
        return self._replace(segment=segment)


class Drawn(NamedTuple):
    """What a request says in a step, with what the device knows of it while it is in its hands."""

    said: Said
    ids: list[int]
    """Of its tokens."""
    passes: bool
    """There is no error in it, and its finish rule finds no end."""


RowResult = Drawn | Exception | None
"""What was drawn after the last row; what went wrong; None: no token was due, or nobody is there to hear of it."""

Allowed = Mapping[int, Ordered[Flags | ServingError]]
"""For rows that are drawn under a grammar, by index in the step: what may follow the last row, and each draft behind
it as far as that can be reached. Missing: the request has ended."""


class _Relay(NamedTuple):
    """What was drawn last for a slot."""

    generation: int
    """Of the slot's holder."""
    position: int
    """Of the last token."""
    ids: tuple[int, ...]
    """The last tokens, as many as a row looks back and itself."""


class LaunchedStep:
    """A step on its way. Made by `Device.launch`."""

    def __init__(self, rows: Ordered[LaunchedRows], work: StepWork, budget: int | None) -> None:
        self.rows = list(rows)
        self.work = work
        self.budget = budget
        """Drafts that it verifies together; None: all."""
        self.results: list[RowResult] = [None] * len(rows)
        self.proposals: dict[int, Proposal] = {}
        """By index."""
        self.proposed: Future[None] = Future()
        """All proposals are known."""
        self.round: tuple[list[int], Round] | None = None
        """Whose drafts, by index."""
        self.survivals: Mapping[Holder, NDArray[np.floating[Any]]] = {}
        """What the drafts of its requests were worth. Known when all of it is drawn."""
        self.logits: dict[int, LogitsOrError] = {}
        """Of guided rows that are not drawn yet, by index."""
        self.futures: list[Future[None]] = []
        self.mark: Mark = None
        """Behind its rows."""

    @property
    def guided(self) -> bool:
        return any(row.guided for row in self.rows)

    def drafts(self, index: int) -> tuple[int, ...]:
        return self.proposals[index].drafts if index in self.proposals else ()


class Device:
    """`launch`, `draw_guided` and `finish` are for one thread, which finishes steps in the order of their launches."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        slots: int,
        look_back: int,
        ahead: bool,
        clock: Clock,
        mark: Callable[[], Mark],
        speculator: Speculator | None = None,
    ) -> None:
        """`look_back`: tokens before its own that a row looks at. `ahead`: steps run on a thread beside the caller;
        else within `launch`. `mark` is called there, behind the rows of each. Without a `speculator` nothing is
        drafted."""
        self._runner = runner
        self._look_back = look_back
        self._clock = clock
        self._mark = mark
        self._speculator = speculator
        self._executor: Executor | _InPlace = ThreadPoolExecutor(1, "engine-device") if ahead else _InPlace()
        # None: nothing that a next row could follow.
        self._relay: list[_Relay | None] = [None] * slots

    def launch(self, rows: Ordered[LaunchedRows], work: StepWork, budget: int | None = None) -> LaunchedStep:
        """Queue a step. Rows that follow a token on its way start with UNKNOWN_ID."""
        step = LaunchedStep(rows, work, budget)
        step.futures.append(self._executor.submit(self._compute, step))
        return step

    def draw_guided(self, step: LaunchedStep, allowed: Allowed) -> None:
        """Queue the drawing of the rows that follow a grammar: before the next launch, once every step before this one
        is finished."""
        step.futures.append(self._executor.submit(self._draw_guided, step, allowed))

    def finish(self, step: LaunchedStep) -> Ordered[RowResult]:
        """Wait for a step. Raises AssertionError if an invariant was broken."""
        for future in step.futures:
            future.result()
        return step.results

    def close(self) -> None:
        """Drop what has not begun, and wait for what has. Idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _compute(self, step: LaunchedStep) -> None:
        started_s = self._clock.monotonic_s()
        try:
            ready = self._prepare(step)
        finally:
            step.proposed.set_result(None)
        outcomes = run_isolated(self._runner, [step.rows[index] for index in ready])
        step.mark = self._mark()
        free: dict[int, LogitsOrError] = {}
        for index, outcome in zip(ready, outcomes, strict=True):
            (step.logits if step.rows[index].guided else free)[index] = outcome
        self._draw(step, free, {})
        drafts = sum(len(proposal.drafts) for proposal in step.proposals.values())
        seconds = self._clock.monotonic_s() - started_s
        step.work = replace(step.work, decode_rows=step.work.decode_rows + drafts, seconds=seconds)
        if not step.guided:
            _account(step)

    def _prepare(self, step: LaunchedStep) -> list[int]:
        """Put the tokens in that the host does not know. Indices of the rows that are there to be computed."""
        ready: list[int] = []
        for index, row in enumerate(step.rows):
            known = self._with_relayed(row)
            if known is not None:
                step.rows[index] = known
                ready.append(index)
        members = [index for index in ready if step.rows[index].drafts_room > 0]
        if self._speculator is None or not members:
            return ready
        candidates = [_candidate(step.rows[index], self._speculator) for index in members]
        round_ = self._speculator.propose(candidates, step.budget)
        if round_ is not None:
            step.round = members, round_
            for index, proposal in zip(members, round_.proposals, strict=True):
                step.proposals[index] = proposal
                step.rows[index] = step.rows[index].with_drafts(proposal.drafts)
        return ready

    def _draw_guided(self, step: LaunchedStep, allowed: Allowed) -> None:
        self._draw(step, {index: outcome for index, outcome in step.logits.items() if index in allowed}, allowed)
        _account(step)

    def _with_relayed(self, row: LaunchedRows) -> LaunchedRows | None:
        """With the tokens that it follows; None if there are none, because drawing failed or the last was drawn."""
        if not row.relayed:
            return row
        drawn = self._relay[row.slot.index]
        if drawn is None or drawn.position + 1 >= row.sequence.tokens_max:
            return None
        assert drawn.generation == row.slot.generation, "a row was to follow a token of its slot's earlier holder"
        segment = row.segment._replace(
            start=drawn.position,
            token_ids=drawn.ids[-1:],
            history=drawn.ids[:-1],
            logits_start=drawn.position if row.draws else None,
        )
        return row._replace(segment=segment)

    def _draw(self, step: LaunchedStep, outcomes: Mapping[int, LogitsOrError], allowed: Allowed) -> None:
        """The tokens that are due after these rows, by index in the step."""
        due: list[int] = []
        hearings: list[Hearing] = []
        for index, outcome in outcomes.items():
            row = step.rows[index]
            if row.draws:
                self._relay[row.slot.index] = None
            if isinstance(outcome, Exception):
                step.results[index] = outcome
            elif row.draws:
                assert outcome is not None, "a row that draws has logits"
                due.append(index)
                hearings.append(_hearing(row, outcome, step.proposals.get(index), allowed.get(index, ())))
        simulated = None if allowed or self._speculator is None else self._speculator.options.simulated_acceptance
        for index, said in zip(due, judge_isolated(hearings, simulated=simulated), strict=True):
            row, drafts = step.rows[index], step.drafts(index)
            step.results[index] = said if isinstance(said, Exception) else self._remember(row, drafts, said)

    def _remember(self, row: LaunchedRows, drafts: tuple[int, ...], said: Said) -> Drawn:
        """What a next row of the sequence would follow."""
        ids = [token.id for token in said if isinstance(token, SampledToken)]
        for token_id in ids:
            row.sequence.sampler.observe(token_id)
        if len(ids) < len(said):
            return Drawn(said, ids, passes=False)
        segment = row.segment
        before = [*segment.history, *segment.token_ids[: len(segment.token_ids) - len(drafts)]]
        last_row = segment.end - 1 - len(drafts)
        kept = [*before, *ids][-self._look_back - 1 :]
        self._relay[row.slot.index] = _Relay(row.slot.generation, last_row + len(ids), tuple(kept))
        return Drawn(said, ids, row.sequence.finish_rule.passes(ids, tokens=last_row + 1))


def _candidate(row: LaunchedRows, speculator: Speculator) -> Candidate:
    request, segment = row.sequence.request, row.segment
    assert len(segment.token_ids) == 1, "what is drafted follows one row"
    return Candidate(
        sampler=row.sequence.sampler,
        anchor=Anchor(
            slot=segment.slot,
            position=segment.start,
            token_id=segment.token_ids[0],
            window_start=row.draft_start,
        ),
        drafts_max=row.drafts_room,
        coupled=speculator.options.couples(request),
        trims=speculator.options.trims(request),
    )


def _hearing(
    row: LaunchedRows, logits: RowLogits, proposal: Proposal | None, allowed: Ordered[Flags | ServingError]
) -> Hearing:
    drafts = proposal.drafts if proposal is not None else ()
    return Hearing(
        row.sequence.sampler,
        row.segment.end - len(drafts),
        logits[len(logits) - 1 - len(drafts) :],
        drafts,
        proposal.laws if proposal is not None else None,
        allowed,
    )


def _account(step: LaunchedStep) -> None:
    """All of it is drawn. What only the device needed goes here, beside the host's thread."""
    if step.round is not None:
        members, round_ = step.round
        accepted = [_accepted(step.results[index]) for index in members]
        step.work = replace(step.work, speculation=round_.work(accepted))
        if round_.survival is not None:
            holders = (step.rows[index].slot.holder for index in members)
            step.survivals = dict(zip(holders, round_.survival, strict=True))
    step.rows.clear()
    step.proposals.clear()
    step.round = None


def _accepted(result: RowResult) -> int:
    return len(result.said) - 1 if isinstance(result, Drawn) else 0


class _InPlace:
    """An executor without a thread."""

    def submit(self, call: Callable[..., None], /, *arguments: object) -> Future[None]:
        future = Future[None]()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001  whoever waits for the future is told
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """Nothing is ever under way."""
