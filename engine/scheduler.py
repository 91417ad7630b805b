"""What one step computes, and for whom. `plan_*` decides and changes nothing; `Scheduler` applies. No clock, no I/O,
no tensor.

    waiting ──admit──▶ holding: loading ▶ prefilling ▶ decoding ──▶ gone
       ▲                        │
       └──────preempt───────────┘

By turn: smaller priorities first, and among equals first come, first served. The first request that does not fit ends
admission, and nobody is preempted for one whose turn is later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import NamedTuple

from whalepod.core.errors import ConfigError
from whalepod.core.lifecycle import Phase

from .block_pool import BlockPool, SlotPool
from .interface import RankLoad, StepWork
from .options import RankOptions
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`chunk_tokens` prompt rows in a step, or `chunk_tokens_beside_decode` if it has decode rows. Chunks that do not
    reach a stop end at multiples of `group_tokens`; a chunk never crosses a stop of its sequence."""

    chunk_tokens: int
    chunk_tokens_beside_decode: int
    group_tokens: int
    block_tokens: int
    draft_tokens: int = 0
    """Drafts behind a decode row, at most."""


def step_limits(options: RankOptions, *, group_tokens: int, block_tokens: int) -> StepLimits:
    """Raises ConfigError, naming the setting, if a chunk could not hold one group of the model's."""
    for name in ("chunk_tokens", "chunk_tokens_beside_decode"):
        if getattr(options, name) < group_tokens:
            raise ConfigError(f"{name} must be at least {group_tokens} for this model, not {getattr(options, name)}")
    return StepLimits(
        chunk_tokens=options.chunk_tokens,
        chunk_tokens_beside_decode=options.chunk_tokens_beside_decode,
        group_tokens=group_tokens,
        block_tokens=block_tokens,
        draft_tokens=0 if options.speculation is None else options.speculation.draft_tokens,
    )


class PlannedRows(NamedTuple):
    """Rows `start` … `end - 1`, if no draft in flight stands; else as many rows further on. `new_blocks` are taken for
    them.

    A tuple, like all that is made for each sequence in each step: it takes a third of the time of a frozen dataclass.
    """

    sequence: Sequence
    start: int
    end: int
    draws: bool
    """The last row is that of the last token, known or on its way: the next one is drawn from it."""
    new_blocks: int = 0
    drafts: int = 0
    """Rows of drafts behind them, at most."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    preempt: tuple[Sequence, ...]
    """These give up everything first, latest turn first."""
    rows: tuple[PlannedRows, ...]
    """Decode rows, then chunks, each by turn."""
    decode_rows: int
    """How many of them are decode rows."""

    @property
    def work(self) -> StepWork:
        """Before it is run: how much it is. Takes no time yet."""
        return StepWork(self.decode_rows, sum(chunk.end - chunk.start for chunk in self.rows[self.decode_rows :]))


def plan_admission(
    waiting: Iterable[Sequence],
    *,
    slots_free: int,
    blocks_free: int,
    blocks_watermark: int,
    blocks_wanted: Callable[[Sequence], int],
    anyone_holds: bool,
) -> Sequence | None:
    """The waiting sequence that gets a slot and blocks now, if any: the first by turn, if it fits.

    The watermark stays free for those that run, so that admission does not cause the next preemption; who runs alone
    may take everything.
    """
    first = next((sequence for sequence in waiting if sequence.admissible), None)
    if first is None or not slots_free:
        return None
    reserve = blocks_watermark if anyone_holds else 0
    return first if blocks_wanted(first) + reserve <= blocks_free else None


def plan_step(
    holding: Ordered[Sequence],
    *,
    blocks_free: int,
    blocks_released: Callable[[Sequence], int],
    stops: Callable[[Sequence], Ordered[int]],
    limits: StepLimits,
) -> StepPlan:
    """One step of the sequences that hold a slot, by turn.

    Every decoding sequence gets its row, and drafts behind it while there are blocks. Where a block for a row is
    missing the latest turn is preempted, perhaps the one that asks. Then chunks, under a budget. `blocks_released`
    says how many blocks a sequence's leaving would free, `stops` where its chunks must end, ascending.
    """
    preempted: list[Sequence] = []
    rows: list[PlannedRows] = []
    for sequence in holding:
        if not sequence.decodes or not sequence.computes or sequence in preempted:
            continue
        start = sequence.launched
        room = sequence.tokens_max - start - 2
        drafts = limits.draft_tokens if limits.draft_tokens <= room else max(0, room)
        new_blocks = _blocks_missing(sequence, start + 1 + drafts, limits)
        if new_blocks > blocks_free:  # a draft is worth nobody's place
            drafts, new_blocks = 0, _blocks_missing(sequence, start + 1, limits)
        while new_blocks > blocks_free and sequence not in preempted:
            victim = _latest(holding, preempted)
            preempted.append(victim)
            blocks_free += blocks_released(victim)
        if sequence not in preempted:
            rows.append(_rows(sequence, start, start + 1, new_blocks, drafts))
            blocks_free -= new_blocks
    decode_rows = len(rows)
    budget = limits.chunk_tokens_beside_decode if rows else limits.chunk_tokens
    for sequence in holding:
        if sequence.phase is not Phase.PREFILLING or sequence.decodes or sequence in preempted:
            continue
        its_stops = stops(sequence)
        if sequence.steps_in_flight and sequence.launched in its_stops:
            continue  # its windows at a stop are copied before more rows write to their ring
        end = chunk_end(sequence, stops=its_stops, budget=budget, group_tokens=limits.group_tokens)
        if end > sequence.launched:
            rows.append(_rows(sequence, sequence.launched, end))
            budget -= end - sequence.launched
    return StepPlan(tuple(preempted), tuple(rows), decode_rows)


def chunk_end(sequence: Sequence, *, stops: Ordered[int], budget: int, group_tokens: int) -> int:
    """Where the next chunk of a sequence ends; `launched` if no chunk fits into the budget."""
    next_stop = bisect.bisect_right(stops, sequence.launched)
    limit = min(sequence.rows_end, stops[next_stop]) if next_stop < len(stops) else sequence.rows_end
    if sequence.shows_images:  # no further than to the first whose rows are missing
        limit = max(sequence.launched, min(limit, sequence.rows_ready))
    end = sequence.launched + budget
    if end >= limit:
        return limit
    return max(sequence.launched, end - end % group_tokens)


def _rows(sequence: Sequence, start: int, end: int, new_blocks: int = 0, drafts: int = 0) -> PlannedRows:
    draws = end == len(sequence.tokens) + sequence.drawing
    return PlannedRows(sequence, start, end, draws, new_blocks, drafts)


def _blocks_missing(sequence: Sequence, rows: int, limits: StepLimits) -> int:
    """For so many rows, wherever the drafts in flight put the last of them."""
    end = rows + sequence.drafts_in_flight
    if end <= len(sequence.blocks) * limits.block_tokens:
        return 0
    return max(0, -(-min(end, sequence.tokens_max) // limits.block_tokens) - len(sequence.blocks))


def _latest(holding: Ordered[Sequence], preempted: list[Sequence]) -> Sequence:
    """The latest turn that still holds blocks. A finished prompt that waits for its hand-off is about to leave
    anyway."""
    return next(
        sequence
        for sequence in reversed(holding)
        if sequence not in preempted and (sequence.phase is not Phase.PREFILLING or sequence.rows_pending)
    )


class Scheduler:
    """Owns the queues and the pools; every change of who holds what goes through here."""

    def __init__(
        self, *, blocks: BlockPool, slots: SlotPool, limits: StepLimits, stops: Callable[[Sequence], Ordered[int]]
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self._limits = limits
        self._stops = stops
        self._watermark = max(1, blocks.blocks_total // 100)
        self._waiting: list[Sequence] = []
        self._holding: list[Sequence] = []
        self._departed: list[Sequence] = []
        """Ended, but rows of theirs are still being computed."""

    @property
    def waiting(self) -> Ordered[Sequence]:
        """Holding nothing, by turn; those that await a hand-off or their grammar too."""
        return self._waiting

    @property
    def holding(self) -> Ordered[Sequence]:
        """Holding a slot, by turn."""
        return self._holding

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_turn)

    def plan_admission(self, reusable: Callable[[Sequence], Ordered[int]]) -> Sequence | None:
        """Who is admitted next. `reusable` finds the blocks that a sequence would share."""
        return plan_admission(
            self._waiting,
            slots_free=self.slots.slots_free,
            blocks_free=self.blocks.blocks_free,
            blocks_watermark=self._watermark,
            blocks_wanted=lambda sequence: self._wanted(sequence, reusable(sequence)),
            anyone_holds=bool(self._holding),
        )

    def apply_admission(self, sequence: Sequence, shared: Ordered[int]) -> None:
        """Give it a slot, the blocks it shares, and fresh ones for all rows that are to be computed."""
        self._waiting.remove(sequence)
        bisect.insort(self._holding, sequence, key=_turn)
        sequence.slot = self.slots.acquire()
        self.blocks.retain(shared)
        fresh = self.blocks.allocate(self._blocks_of(sequence.rows_end) - len(shared))
        sequence.blocks = (*shared, *fresh)

    def plan_step(self) -> StepPlan:
        return plan_step(
            self._holding,
            blocks_free=self.blocks.blocks_free,
            blocks_released=lambda sequence: self.blocks.held_once_among(sequence.blocks),
            stops=self._stops,
            limits=self._limits,
        )

    def apply_preemption(self, sequence: Sequence) -> None:
        """Take everything back; it waits in its old place."""
        assert not sequence.steps_in_flight, "rows of a sequence that is preempted are on their way"
        self._holding.remove(sequence)
        self._give_back(sequence)
        sequence.advance(Phase.WAITING)
        self.add(sequence)

    def apply_rows(self, plan: StepPlan) -> None:
        """Take the blocks that the planned rows need; the rows are on their way."""
        for planned in plan.rows:
            sequence = planned.sequence
            if planned.new_blocks:
                sequence.blocks += tuple(self.blocks.allocate(planned.new_blocks))
            sequence.rows_in_flight += planned.end - planned.start
            sequence.steps_in_flight += 1
            sequence.drawing += planned.draws
            sequence.drafts_in_flight += planned.drafts

    def apply_result(self, planned: PlannedRows) -> bool:
        """Planned rows were computed. False: their sequence has ended meanwhile, and nobody wants them."""
        sequence = planned.sequence
        sequence.rows_in_flight -= planned.end - planned.start
        sequence.steps_in_flight -= 1
        sequence.drawing -= planned.draws
        sequence.drafts_in_flight -= planned.drafts
        if sequence not in self._departed:
            return True
        if not sequence.steps_in_flight:
            self._departed.remove(sequence)
            self._give_back(sequence)
        return False

    def has_departed(self, sequence: Sequence) -> bool:
        """It has ended, but not yet given back what it holds."""
        return sequence in self._departed

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends, wherever it is. Rows of it that are on their way write to what it holds until they are
        done."""
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        self._holding.remove(sequence)
        if sequence.steps_in_flight:
            self._departed.append(sequence)
        else:
            self._give_back(sequence)

    def load(self) -> RankLoad:
        """As of now."""
        queued = sum(
            sequence.rows_pending
            for sequences in (self._waiting, self._holding)
            for sequence in sequences
            if sequence.phase is not Phase.DECODING
        )
        return RankLoad(
            running=len(self._holding),
            waiting=len(self._waiting),
            blocks_free=self.blocks.blocks_free,
            blocks_total=self.blocks.blocks_total,
            prefill_tokens_queued=queued,
            slots_total=self.slots.slots_total,
        )

    def check(self) -> None:
        """Assert that blocks and slots are conserved."""
        owners = (*self._holding, *self._departed)
        self.blocks.check([sequence.blocks for sequence in owners])
        self.slots.check([sequence.slot for sequence in owners if sequence.slot is not None])
        assert all(sequence.slot is None and not sequence.blocks for sequence in self._waiting)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.slots.release(sequence.slot)
        self.blocks.release(sequence.blocks)
        sequence.slot, sequence.blocks = None, ()

    def _wanted(self, sequence: Sequence, shared: Ordered[int]) -> int:
        """Free blocks that admission takes: those held by others cost nothing, idle ones stop being free."""
        return self._blocks_of(sequence.rows_end) - len(shared) + self.blocks.idle_among(shared)

    def _blocks_of(self, rows: int) -> int:
        return -(-rows // self._limits.block_tokens)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
