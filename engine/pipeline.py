"""Steps on their way to the device and back, in order. With `async_scheduling` one runs while the next is planned and
queued behind it (`runtime.md` §1.5).

    plan ──▶ launch ──▶ device ──▶ settle ──▶ (rows, what came of them)

Planning takes one token of every row on its way for granted, and has room for as many more as there may be drafts. If
it turns out to have been a request's last, the row behind it was computed for nothing: its result is dropped, and what
it wrote to is given back only after it has run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered

from whalepod.core.clock import Clock
from whalepod.model.batch import Segment, image_rows
from whalepod.model.config import ModelConfig

from .device import UNKNOWN_ID, Device, LaunchedRows, LaunchedStep, RowResult
from .guiding import Guide
from .host_copies import HostCopies
from .interface import StepWork
from .options import RankOptions
from .rank_model import RankModel
from .runner import StepRunner
from .scheduler import PlannedRows, Scheduler, StepPlan
from .sequence import Sequence
from .speculation.budget import Planner, new_planner
from .speculation.speculator import Speculator


class Pipeline:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        device: Device,
        *,
        copies: HostCopies,
        scheduler: Scheduler,
        guide: Guide,
        config: ModelConfig,
        steps_ahead: int,
        planner: Planner | None = None,
        observe: Callable[[StepWork], None],
        expect: Callable[[Ordered[int], Ordered[int]], None],
    ) -> None:
        """Without a `planner` all drafts are verified. `observe` is told of every step that comes back, `expect` of
        tokens that the next step is likely to have rows of, and of those before them."""
        self._expect = expect
        self._observe = observe
        self._device = device
        self._copies = copies
        self._scheduler = scheduler
        self._guide = guide
        self._config = config
        self._steps_ahead = steps_ahead
        self._planner = planner
        self._steps_launched = 0
        self._steps_settled = 0
        self._flying: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.works: list[StepWork] = []
        """Of the steps that have come back, until somebody takes them."""

    def __len__(self) -> int:
        """Steps that are on their way."""
        return len(self._flying)

    def launch(self, plan: StepPlan) -> int:
        """Take what the plan needs and send its rows off. How many steps may stay on their way meanwhile."""
        if not plan.rows:
            return 0
        work = plan.work
        self._scheduler.apply_rows(plan)
        rows = [self._launched(planned) for planned in plan.rows]
        self._flying.append((plan, self._device.launch(rows, work, self._budget(rows))))
        self._steps_launched += 1
        for planned in plan.rows:
            self._expect_next(planned)
        if len(self._flying) == 1:
            self._guide_first()
        return self._steps_ahead

    def settle(self, *, ahead: int) -> Iterator[tuple[PlannedRows, RowResult]]:
        """Bring steps back until `ahead` are on their way: all rows of requests that are still here, one by one.

        The caller commits each before it asks for the next.
        """
        while len(self._flying) > ahead:
            plan, step = self._flying.popleft()
            results = self._device.finish(step)
            self._copies.settle(step.mark)
            self.works.append(step.work)
            self._observe(step.work)
            if self._planner is not None:
                self._planner.observe(self._steps_settled, step.survivals)
            self._steps_settled += 1
            for planned, result in zip(plan.rows, results, strict=True):
                if self._scheduler.apply_result(planned):
                    yield planned, result
            self._guide_first()

    def forget(self) -> None:
        """No step has come back so far: none counts as work, and nothing is concluded from one."""
        self.works = []
        if self._planner is not None:
            self._planner.forget()

    def close(self) -> None:
        self._device.close()

    def _expect_next(self, planned: PlannedRows) -> None:
        """Of a prompt, a chunk as long as the last one comes next."""
        tokens, end = planned.sequence.tokens, planned.end
        if end < len(tokens):
            self._expect(
                tokens[end : 2 * end - planned.start],
                tokens[max(0, end - self._config.engram_max_ngram_size + 1) : end],
            )

    def _budget(self, rows: Ordered[LaunchedRows]) -> int | None:
        """Drafts that the next step verifies together; None: all."""
        if self._planner is None:
            return None
        drafting = [row for row in rows if row.drafts_max]
        return self._planner.plan(
            self._steps_launched, [row.slot.holder for row in drafting], [row.drafts_max for row in drafting]
        )

    def _launched(self, planned: PlannedRows) -> LaunchedRows:
        sequence = planned.sequence
        assert sequence.slot is not None
        guided = planned.draws and sequence.grammar is not None
        return (
            LaunchedRows(  # by place, like all that is made for each sequence in each step: names take twice the time
                sequence,
                sequence.slot,
                segment_of(planned, self._config),
                planned.draws,
                guided,
                planned.drafts,
                draft_start(sequence, self._config),
            )
        )

    def _guide_first(self) -> None:
        """All tokens before the first step are known now: say what may follow in it."""
        if not self._flying or not self._flying[0][1].guided:
            return
        step = self._flying[0][1]
        step.proposed.result()
        allowed = {
            index: self._guide.allowed(row.sequence, step.drafts(index))
            for index, row in enumerate(step.rows)
            if row.guided and not self._scheduler.has_departed(row.sequence)
        }
        self._device.draw_guided(step, allowed)


def new_pipeline(
    model: RankModel,
    options: RankOptions,
    *,
    runner: StepRunner,
    copies: HostCopies,
    slots: int,
    scheduler: Scheduler,
    guide: Guide,
    observe: Callable[[StepWork], None],
    clock: Clock,
) -> Pipeline:
    """With a device that runs steps of `runner`. Raises ConfigError if drafts do not fit the model."""
    config, ahead = model.config, options.async_scheduling
    speculator = planner = None
    if options.speculation is not None:
        options.speculation.check(config, weights=model.weights, slots=slots)
        speculator = Speculator(options.speculation, runner.draft, clock=clock)
        planner = new_planner(options.speculation)
    device = Device(
        runner,
        slots=slots,
        look_back=config.engram_max_ngram_size - 1,
        ahead=ahead,
        clock=clock,
        mark=copies.mark,
        speculator=speculator,
    )
    return Pipeline(
        device,
        copies=copies,
        scheduler=scheduler,
        guide=guide,
        config=config,
        steps_ahead=int(ahead),
        planner=planner,
        observe=observe,
        expect=model.network.expect,
    )


def draft_start(sequence: Sequence, config: ModelConfig) -> int:
    """From where on the draft windows hold rows of this sequence: those that the layers above the last KV source have
    computed, or the W that came with a snapshot."""
    floor, restored = sequence.floor, sequence.restored_tokens
    return max(floor, restored - config.window) if restored > floor else floor


def segment_of(planned: PlannedRows, config: ModelConfig) -> Segment:
    """What the network is told about these rows. Rows that end before L need no logits, whatever comes after them."""
    sequence, start = planned.sequence, planned.start
    assert sequence.slot is not None
    if start < len(sequence.tokens):
        token_ids = sequence.tokens[start : planned.end]
        history = sequence.tokens[max(0, start - config.engram_max_ngram_size + 1) : start]
    else:  # the device knows both
        token_ids, history = (UNKNOWN_ID,), ()
    logits_start = planned.end - 1 if planned.draws else None
    images = image_rows(sequence.spans.items(), start=start, end=planned.end) if sequence.shows_images else ()
    return Segment(
        sequence.slot.index,
        sequence.blocks,
        start,
        token_ids,
        history,
        sequence.floor,
        sequence.window_start,
        sequence.write_start,
        logits_start,
        images,
    )
