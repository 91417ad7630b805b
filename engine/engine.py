"""The requests of one rank, stepped by hand: no thread, no lock, no waiting. `EngineRank` runs it on a thread, `LLM`
in place.

submit, cancel, hand_off, answer ──▶ sequences
step():  expire ▶ admit ▶ restore ▶ plan ▶ preempt ▶ launch ▶ commit the step before ──▶ events
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import replace

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import CapacityError, DeadlineError, InternalError, ServingError
from whalepod.core.ids import RequestId
from whalepod.core.lifecycle import Outcome, Phase
from whalepod.model.tensor_layout import ModelRole

from . import branching
from .admission import request_checks
from .block_pool import BlockPool, SlotPool
from .committing import End, commit_tokens, judge, try_commit_all
from .device import RowResult
from .expiry import Expiry
from .finish import OUTCOMES, Finish
from .grammar.compiler import rank_compiler
from .group_runner import step_runner
from .guiding import GrammarReady, Guide
from .interface import (
    EngineRequest,
    FinishReason,
    Handoff,
    RankLoad,
    SampledToken,
    SnapshotKind,
    StepEvent,
    StepWork,
)
from .memory_plan import MemoryPlan, plan_memory
from .options import RankOptions
from .pipeline import new_pipeline
from .publishing import Publisher, finished_handoff
from .rank_model import RankModel
from .report import Report
from .restore import RestorePlan
from .restoring import Restorer
from .runner import StepRunner
from .scheduler import PlannedRows, Scheduler, step_limits
from .sequence import Leaving, Sequence, new_sequence
from .span_rows import SpanLoader, SpanReady, SpanSource
from .state_image import StateImage
from .state_store import Answer, Loaded, Prefetched, RoomFreed, StateStore
from .transfers import Transfers, new_transfers

Delivery = Answer | GrammarReady | SpanReady


class Engine:
    """Belongs to one thread. `transfers` says what is to be done for the store; its workers, and those that compile
    grammars, call `deliver`, and what they deliver is to be given to `answer` on the engine's thread."""

    def __init__(
        self,
        model: RankModel,
        options: RankOptions,
        *,
        store: StateStore | None,
        deliver: Callable[[Delivery], None],
        spans: SpanSource | None = None,
        instrument: Callable[[StepRunner], StepRunner] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Allocates the caches. `spans` None: no request may have images. `instrument` puts something between the
        engine and its network.

        Raises ConfigError if the memory plan or a limit does not fit the model.
        """
        config, boundaries = model.config, model.boundaries
        self.memory: MemoryPlan = plan_memory(model, options)
        self.checks = request_checks(model, self.memory.context_tokens_max, sees_images=spans is not None)
        self._model = model
        self._boundaries = boundaries
        self._block_tokens = boundaries.block_tokens
        self._chunk_tokens = options.chunk_tokens
        self._clock = clock
        limits = step_limits(options, group_tokens=config.group_tokens, block_tokens=model.block_tokens)
        pool, slots = BlockPool(self.memory.blocks), SlotPool(self.memory.slots)
        self._scheduler = Scheduler(blocks=pool, slots=slots, limits=limits, stops=self._chunk_stops)
        caches = model.allocate(blocks=self.memory.blocks, slots=self.memory.slots)
        image = StateImage(caches, config)
        self.transfers: Transfers | None = None
        if store is not None:
            self.transfers = new_transfers(store, image, options, deliver=deliver, clock=clock)
        self._restorer = Restorer(
            image=image, pool=pool, boundaries=boundaries, transfers=self.transfers, options=options
        )
        self._publisher = Publisher(
            image=image,
            pool=pool,
            boundaries=boundaries,
            transfers=self.transfers,
            options=options,
            handoff_kind=SnapshotKind.ENCODER if model.role is ModelRole.ENCODER else SnapshotKind.FULL,
            clock=clock,
        )
        self._guide = Guide(
            rank_compiler(model.tokenizer, vocab_size=config.vocab_size, eos_id=config.eos_token_id),
            vocab_size=config.vocab_size,
            slots=self.memory.slots,
            deliver=deliver,
        )
        runner = step_runner(model, caches, image, self.transfers)
        self._runner: StepRunner = runner if instrument is None else instrument(runner)
        self._pipeline = new_pipeline(
            model,
            options,
            runner=self._runner,
            copies=image.copies,
            slots=self.memory.slots,
            scheduler=self._scheduler,
            guide=self._guide,
            observe=self._restorer.worth.note_step,
            clock=clock,
        )
        self._span_loader = None if spans is None else SpanLoader(spans, deliver)
        self.preempted = 0
        """How often a request had to give up what it held."""
        self._sequences: dict[RequestId, Sequence] = {}
        self._expiry = Expiry()
        self._arrivals = 0
        self._report = Report()

    # Messages from outside. Their events, if any, come with the next step.

    def submit(self, request: EngineRequest) -> None:
        """Accept a checked request. A live attempt of it must have been superseded before."""
        assert request.request_id not in self._sequences
        self._model.network.expect(request.prompt_ids[: self._chunk_tokens], ())
        sequence = self._new_sequence(request)
        branching.join(sequence, self._sequences)
        self._sequences[request.request_id] = sequence
        self._expiry.note(request.deadline)
        self._scheduler.add(sequence)
        try:
            if self._model.role is not ModelRole.ENCODER:  # which draws no token
                self._guide.begin(sequence)
        except CapacityError as error:
            self._end_with_error(sequence, error)
            return
        if sequence.awaiting:
            self._restorer.prefetch(sequence)
        if sequence.rows_end == 0:
            self._hand_over(sequence, Handoff(boundary_tokens=0, kind=None))

    def cancel(self, request_id: RequestId, attempt: int, *, goes_on: bool = False) -> None:
        """Drop a request without a word, and a hand-off nobody was told of. Unknown or ended: does nothing."""
        sequence = self._live(request_id, attempt)
        if sequence is not None:
            self._publisher.forget_crash(sequence, goes_on=goes_on)
            self._remove(sequence, Outcome.ABORT)
        self._publisher.unlink_unheard(self._report.forget(request_id, attempt))

    def fail(self, request_id: RequestId, attempt: int, error: ServingError) -> None:
        """End a request with an error. Unknown or ended: does nothing."""
        sequence = self._live(request_id, attempt)
        if sequence is not None:
            self._end_with_error(sequence, error)

    def hand_off(self, request_id: RequestId, attempt: int, handoff: Handoff) -> None:
        """A request that was waiting for its hand-off goes on. Unknown, ended or repeated: does nothing."""
        sequence = self._live(request_id, attempt)
        if sequence is None or not sequence.awaiting:
            return
        sequence.awaiting = False
        usable = handoff.stored and handoff.kind is not None
        sequence.handoff = handoff if usable else replace(handoff, boundary_tokens=0, kind=None)
        if usable or handoff.finish_reason is not None:
            sequence.cached_tokens, sequence.replayed_tokens = handoff.cached_tokens, handoff.replayed_tokens
        branching.wait_for_blocks(sequence, self._sequences)
        if handoff.first_token is not None:
            try:
                self._guide.follow(sequence, handoff.first_token.id)
            except ServingError as error:
                self._end_with_error(sequence, error)
                return
            sequence.sampler.observe(handoff.first_token.id)
            sequence.extend((handoff.first_token.id,))
            self._report.tokens(sequence, (handoff.first_token,))
        if handoff.finish_reason is not None:
            self._end(sequence, Finish(handoff.finish_reason, handoff.matched_stop_id))

    def answer(self, answer: Delivery) -> None:
        """The store or the compiler has answered. Answers for what has ended are dropped."""
        if isinstance(answer, RoomFreed):
            return  # the next step offers again
        if isinstance(answer, GrammarReady):
            self._grammar_ready(answer)
            return
        if isinstance(answer, SpanReady):
            self._span_ready(answer)
            return
        if isinstance(answer, Prefetched):
            self._restorer.prefetched(self._live(answer.job.request_id, answer.job.attempt), answer)
            return
        sequence = self._live(answer.owner.request_id, answer.owner.attempt)
        if sequence is None or sequence.slot is None or sequence.owner != answer.owner:
            return
        if isinstance(answer, Loaded):
            self._resume(sequence, self._restorer.complete(sequence, answer))
        elif (handoff := self._publisher.left(sequence, answer)) is not None:
            self._hand_over(sequence, handoff)

    def _grammar_ready(self, ready: GrammarReady) -> None:
        sequence = self._live(ready.request_id, ready.attempt)
        if sequence is None:
            return
        try:
            self._guide.complete(sequence, ready)
        except ServingError as error:
            self._end_with_error(sequence, error)

    def _span_ready(self, ready: SpanReady) -> None:
        sequence = self._live(ready.request_id, ready.attempt)
        if sequence is not None and self._span_loader is not None:
            error = self._span_loader.complete(sequence, ready)
            if error is not None:
                self._end_with_error(sequence, error)

    # What the thread around it wants to know.

    def take_works(self) -> list[StepWork]:
        """What the steps that have come back since the last call computed."""
        works, self._pipeline.works = self._pipeline.works, []
        return works

    def forget_steps(self) -> None:
        """What steps took so far, and what drafts were worth in them, says nothing about those that come."""
        self._pipeline.forget()
        self._restorer.worth.forget()
        self.preempted = 0

    @property
    def runnable(self) -> bool:
        """Another step would do something, without a new message."""
        if self._pipeline or any(sequence.computes for sequence in self._scheduler.holding):
            return True
        return self._scheduler.plan_admission(self._restorer.reusable) is not None

    @property
    def compiling(self) -> bool:
        """A request waits for its grammar, or for rows of an image: an answer will come."""
        scheduler = self._scheduler
        return any(sequence.compiling for sequence in scheduler.waiting) or any(
            sequence.spans_coming for sequence in scheduler.holding
        )

    def waiting_counts(self) -> tuple[int, int]:
        """Requests that hold nothing yet, and how many of those await a hand-off."""
        waiting = self._scheduler.waiting
        return len(waiting), sum(sequence.awaiting for sequence in waiting)

    def next_deadline_s(self) -> float | None:
        """Seconds until the next request may run out of time; None: there is no request."""
        return self._expiry.remaining_s() if self._sequences else None

    def load(self) -> RankLoad:
        return self._scheduler.load()

    def check(self) -> None:
        """Assert that blocks and slots are conserved."""
        self._scheduler.check()
        assert len(self._sequences) == len(self._scheduler.waiting) + len(self._scheduler.holding)

    def close(self) -> None:
        """End what is done beside it for its requests. The caches live as long as it does."""
        self._pipeline.close()
        self._guide.close()
        if self._span_loader is not None:
            self._span_loader.close()
        if self.transfers is not None:
            self.transfers.close()

    # One step.

    def step(self) -> list[StepEvent]:
        """Launch one step, and return everything that has happened since the last one, in order."""
        self._expire()
        self._admit()
        for sequence in list(self._scheduler.holding):
            if sequence.is_prefill and sequence.phase is not Phase.LOADING:  # then it is asked what is stored
                self._publisher.publish_blocks(sequence)
                self._try_leave(sequence)
        plan = self._scheduler.plan_step()
        if plan.preempt and self._pipeline:
            # Who gives up its state has all of it, and perhaps nobody needs to.
            self._settle(ahead=0)
            plan = self._scheduler.plan_step()
        for victim in plan.preempt:
            self._preempt(victim)
        self._settle(ahead=self._pipeline.launch(plan))
        return self._report.take()

    def _expire(self) -> None:
        if not self._expiry.due:
            return
        for sequence in list(self._sequences.values()):
            if sequence.request.deadline.expired:
                self._end_with_error(sequence, DeadlineError("the request ran out of time"))
        self._expiry.left(sequence.request.deadline for sequence in self._sequences.values())

    def _admit(self) -> None:
        while (sequence := self._scheduler.plan_admission(self._restorer.reusable)) is not None:
            shared = self._restorer.reusable(sequence)
            self._scheduler.apply_admission(sequence, shared)
            plan = self._restorer.begin(sequence, shared)
            if plan is not None:
                self._resume(sequence, plan)

    def _resume(self, sequence: Sequence, plan: RestorePlan) -> None:
        """Its state is on the device; what is missing is computed from here on."""
        branching.restored(sequence)
        self._publisher.unpark(sequence)
        if sequence.cached_tokens is None:
            hit = plan.boundary if sequence.handoff is None else sequence.handoff.hit_of(plan.boundary)
            sequence.cached_tokens, sequence.replayed_tokens = hit, plan.replayed_tokens
        self._publisher.handoff_read(sequence)
        self._want_spans(sequence)
        decoding = sequence.computed >= sequence.prompt_tokens and sequence.rows_pending == 1
        sequence.advance(Phase.DECODING if decoding else Phase.PREFILLING)
        if not sequence.rows_pending:
            self._rows_done(sequence)

    def _want_spans(self, sequence: Sequence) -> None:
        """Rows of it were computed or restored: other images may be needed now."""
        if self._span_loader is not None and sequence.shows_images:
            self._span_loader.want(sequence)

    def _preempt(self, victim: Sequence) -> None:
        self.preempted += 1
        if victim.phase is not Phase.LOADING:
            self._publisher.park(victim)
        self._publisher.let_go(victim)
        self._scheduler.apply_preemption(victim)

    def _settle(self, *, ahead: int) -> None:
        for planned, result in self._pipeline.settle(ahead=ahead):
            self._commit(planned, result)

    def _commit(self, planned: PlannedRows, result: RowResult) -> None:
        sequence = planned.sequence
        if isinstance(result, Exception):
            known = isinstance(result, ServingError)
            self._end_with_error(sequence, result if known else InternalError("the model failed on this request"))
            return
        rows = planned.end - planned.start
        if (tokens := try_commit_all(sequence, rows, result, block_tokens=self._block_tokens)) is not None:
            self._report.tokens(sequence, tokens)
            return
        sequence.computed += rows
        self._want_spans(sequence)
        self._publisher.commit_rows(sequence)
        if sequence.followers:
            branching.fork(sequence, self._publisher)
        if sequence.prompt_scores is not None:
            self._report.prompt_scores(sequence)
        if sequence.rows_pending:
            return
        if result is None:
            self._rows_done(sequence)
        elif sequence.is_prefill:
            self._prefilled(sequence, result.said[0])
        else:
            tokens, end = commit_tokens(sequence, result.said, guide=self._guide, publisher=self._publisher)
            if tokens:
                sequence.advance(Phase.DECODING)
                self._report.tokens(sequence, tokens)
            if end is not None:
                self._end_if(sequence, end)

    def _rows_done(self, sequence: Sequence) -> None:
        """The hand-off of a prompt without a token is due."""
        sequence.leaving = Leaving(first_token=None)
        self._try_leave(sequence)

    def _prefilled(self, sequence: Sequence, said: SampledToken | ServingError) -> None:
        if isinstance(said, ServingError):
            self._end_with_error(sequence, said)
            return
        end = judge(sequence, said, self._guide, output_tokens=sequence.output_tokens + 1)
        if isinstance(end, ServingError):
            self._end_with_error(sequence, end)
        elif end is None:
            sequence.leaving = Leaving(first_token=said)
            self._try_leave(sequence)
        else:
            self._hand_over(sequence, finished_handoff(sequence, said, end))

    def _try_leave(self, sequence: Sequence) -> None:
        handoff = self._publisher.try_leave(sequence) if sequence.leaving is not None else None
        if handoff is not None:
            self._hand_over(sequence, handoff)

    # Ends. Each owner gives back what it holds.

    def _hand_over(self, sequence: Sequence, handoff: Handoff) -> None:
        self._report.handoff(sequence, handoff)
        self._report.end(sequence, Finish(handoff.finish_reason or FinishReason.STOP, handoff.matched_stop_id))
        self._remove(sequence, Outcome.HANDED_OFF, delivered=handoff.stored)

    def _end_if(self, sequence: Sequence, end: End) -> None:
        if isinstance(end, ServingError):
            self._end_with_error(sequence, end)
        elif end is not None:
            self._end(sequence, end)

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        self._report.end(sequence, finish)
        self._publisher.forget_crash(sequence)
        self._remove(sequence, OUTCOMES[finish.reason])

    def _end_with_error(self, sequence: Sequence, error: ServingError) -> None:
        self._report.end(sequence, Finish(FinishReason.ERROR), error)
        self._publisher.forget_crash(sequence, after=error)
        self._remove(sequence, Outcome.ERROR)

    def _remove(self, sequence: Sequence, outcome: Outcome, *, delivered: bool = False) -> None:
        branching.leave(sequence)
        self._restorer.forget(sequence)
        self._publisher.end(sequence, delivered=delivered)
        self._scheduler.remove(sequence)
        sequence.finish(outcome)
        del self._sequences[sequence.request.request_id]

    def _live(self, request_id: RequestId, attempt: int) -> Sequence | None:
        sequence = self._sequences.get(request_id)
        return sequence if sequence is not None and sequence.request.attempt == attempt else None

    def _new_sequence(self, request: EngineRequest) -> Sequence:
        self._arrivals += 1
        return new_sequence(
            request,
            arrival=self._arrivals,
            boundaries=self._boundaries,
            draws=self._model.role is not ModelRole.ENCODER,
            context_tokens_max=self.memory.context_tokens_max,
        )

    def _chunk_stops(self, sequence: Sequence) -> Ordered[int]:
        return branching.stops_of(sequence, self._boundaries.turn_borders(sequence.prompt_tokens))
