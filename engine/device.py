"""Where the rows of a step are computed and its tokens drawn: on a thread of its own, in the order of the launches.

    host     launch(n + 1) ── wait for n ── plan n + 2 ──▶
    device   ── forward(n) ─ draw(n) ─ forward(n + 1) ─ draw(n + 1) ──▶

The token that a step draws is the next step's input: the device reads it from its relay, not from the host. A token
under a grammar is drawn when the host, which has seen the tokens before it, says what may follow; only the drawing
waits for that, not the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whalepod.core.clock import Clock
from whalepod.core.errors import ServingError
from whalepod.model.batch import Segment

from .block_pool import Slot
from .grammar.masks import Flags
from .interface import SampledToken, StepWork
from .runner import LogitsOrError, StepRunner, run_isolated
from .sampling import DrawRow, draw_rows
from .sequence import Sequence

UNKNOWN_ID = -1
"""Stands where the device puts the token that it drew in the step before."""


class LaunchedRows(NamedTuple):
    """Rows of one sequence in a launched step. Of the sequence, the device uses the sampler, which is its own while
    rows are launched."""

    sequence: Sequence
    slot: Slot
    segment: Segment
    draws: bool
    """A token is drawn after the last row, unless only the hand-off is due."""
    guided: bool
    """It is drawn under a grammar."""

    @property
    def relayed(self) -> bool:
        return self.segment.token_ids[0] == UNKNOWN_ID


RowResult = SampledToken | Exception | None
"""The token drawn after the last row; what went wrong; None: no token was due, or nobody is there to hear of it."""

Allowed = Mapping[int, Flags | ServingError]
"""For rows that are drawn under a grammar, by index in the step: what may follow. Missing: the request has ended."""


class LaunchedStep:
    """A step on its way. Made by `Device.launch`."""

    def __init__(self, rows: Ordered[LaunchedRows], work: StepWork) -> None:
        self.rows = rows
        self.work = work
        self.results: list[RowResult] = [None] * len(rows)
        self.logits: dict[int, LogitsOrError] = {}
        """Of guided rows that are not drawn yet, by index."""
        self.futures: list[Future[None]] = []

    @property
    def guided(self) -> bool:
        return any(row.guided for row in self.rows)


class Device:
    """`launch`, `draw_guided` and `finish` are for one thread, which finishes steps in the order of their launches."""

    def __init__(self, runner: StepRunner, *, slots: int, ahead: bool, clock: Clock) -> None:
        """`ahead`: steps run on a thread beside the caller; else within `launch`."""
        self._runner = runner
        self._clock = clock
        self._executor: Executor | _InPlace = ThreadPoolExecutor(1, "engine-device") if ahead else _InPlace()
        # What was drawn last for each slot, and for which of its holders. None: nothing that a next row could follow.
        self._relay: list[tuple[int, int] | None] = [None] * slots

    def launch(self, rows: Ordered[LaunchedRows], work: StepWork) -> LaunchedStep:
        """Queue a step. Rows that follow a token on its way start with UNKNOWN_ID."""
        step = LaunchedStep(rows, work)
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
        ready = [(index, row) for index, row in enumerate(map(self._with_relayed, step.rows)) if row is not None]
        outcomes = run_isolated(self._runner, [row for _, row in ready])
        free: dict[int, LogitsOrError] = {}
        for (index, row), outcome in zip(ready, outcomes, strict=True):
            (step.logits if row.guided else free)[index] = outcome
        self._draw(step, free, {})
        step.work = replace(step.work, seconds=self._clock.monotonic_s() - started_s)

    def _draw_guided(self, step: LaunchedStep, allowed: Allowed) -> None:
        heard = {index: outcome for index, outcome in step.logits.items() if index in allowed}
        flags: dict[int, Flags] = {}
        for index, answer in allowed.items():
            if isinstance(answer, ServingError):
                heard[index] = answer
            else:
                flags[index] = answer
        self._draw(step, heard, flags)

    def _with_relayed(self, row: LaunchedRows) -> LaunchedRows | None:
        """With the token that it follows; None if there is none, because drawing it failed."""
        if not row.relayed:
            return row
        drawn = self._relay[row.slot.index]
        if drawn is None:
            return None
        generation, token_id = drawn
        assert generation == row.slot.generation, "a row was to follow a token of its slot's earlier holder"
        return row._replace(segment=row.segment._replace(token_ids=(token_id,)))

    def _draw(self, step: LaunchedStep, outcomes: Mapping[int, LogitsOrError], allowed: Mapping[int, Flags]) -> None:
        """The tokens that are due after these rows, by index in the step."""
        due: list[int] = []
        logits: list[NDArray[np.float32]] = []
        for index, outcome in outcomes.items():
            row = step.rows[index]
            if row.draws:
                self._relay[row.slot.index] = None
            if isinstance(outcome, Exception):
                step.results[index] = outcome
            elif row.draws:
                assert outcome is not None, "a row that draws has logits"
                due.append(index)
                logits.append(outcome)
        if not due:
            return
        rows = [
            DrawRow(step.rows[index].sequence.sampler, step.rows[index].segment.end, allowed=allowed.get(index))
            for index in due
        ]
        for index, row, token in zip(due, rows, draw_rows(np.stack(logits), rows), strict=True):
            step.results[index] = token
            if isinstance(token, SampledToken):
                slot = step.rows[index].slot
                row.sampler.observe(token.id)
                self._relay[slot.index] = (slot.generation, token.id)


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
