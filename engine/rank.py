"""One rank: an engine on its own thread, with a mailbox in front and the store's I/O beside it.

submit / cancel / hand_off ──▶ mailbox ──▶ loop thread ──▶ on_step([event, …])
                                            │  ▲
                                     loads, writes  answers
                                            ▼  │
                                        KV worker threads ──▶ store
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import CapacityError, DrainingError, StaleAttemptError, UnavailableError, WorkerLostError
from whalepod.core.ids import RequestId
from whalepod.core.progress import ProgressReport
from whalepod.kvstore.store_keys import handoff_snapshot_key

from .engine import Delivery, Engine
from .interface import (
    EngineRequest,
    Fidelity,
    FinishedEvent,
    FinishReason,
    Handoff,
    HandoffEvent,
    RankLimits,
    RankLoad,
    StepEvent,
    StepWork,
    Work,
)
from .memory_plan import MemoryPlan
from .options import RankOptions
from .rank_model import RankModel
from .runner import StepRunner
from .span_rows import SpanSource
from .state_store import StateStore
from .transfers import Transfers
from .warm_up import warm_up

log = logging.getLogger(__name__)

LOAD_THREADS = 2
ATTEMPTS_REMEMBERED = 4096
"""Requests whose highest attempt is known after they ended: a late message of a lower one is refused."""
IDLE_S_MAX = 60.0

Key = tuple[RequestId, int]


class EngineRank:
    """Thread-safe. `on_step` is called on the loop's thread, once a step with everything the step produced, in order;
    last of all, by `give_back` on its caller's.

    It must return quickly and must not raise. `on_failure` is called once if the rank stops by itself (a broken
    invariant): every request has then ended with WorkerLostError, and the process should exit.
    """

    def __init__(
        self,
        model: RankModel,
        options: RankOptions,
        *,
        store: StateStore | None,
        on_step: Callable[[Sequence[StepEvent]], None],
        on_failure: Callable[[BaseException], None] | None = None,
        on_work: Callable[[StepWork], None] | None = None,
        spans: SpanSource | None = None,
        instrument: Callable[[StepRunner], StepRunner] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Allocates the caches. The store stays the caller's: close it after `stop`. `on_work` is called like
        `on_step`, after each step that computed rows. `spans` None: no request may have images. `instrument`: as of
        `Engine`.

        Raises ConfigError if the memory plan does not fit.
        """
        self._engine = Engine(
            model, options, store=store, deliver=self._deliver, spans=spans, instrument=instrument, clock=clock
        )
        self._model = model
        self._options = options
        self._clock = clock
        self._on_step = on_step
        self._on_failure = on_failure
        self._on_work = on_work
        self._limits = RankLimits(
            context_tokens_max=self._engine.memory.context_tokens_max,
            slots_total=self._engine.memory.slots,
            block_tokens=model.block_tokens,
            namespace=model.namespace,
            layout=model.layout,
        )
        self._load = self._engine.load()
        # Guards everything below. Held while messages are handled and while events are reported, never while the model
        # runs.
        self._changed = threading.Condition(threading.RLock())
        self._inbox: deque[Callable[[], None]] = deque()
        self._answers: deque[Delivery] = deque()
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        self._unfinished: dict[Key, None] = {}
        self._muted: set[Key] = set()
        self._dropped: list[Key] = []
        self._counts = _Counts()
        self._running = False
        self._stopping = False
        self._threads = [threading.Thread(target=self._loop, name="engine-loop", daemon=True)]
        transfers = self._engine.transfers
        if transfers is not None:
            works = [transfers.work_on_load] * LOAD_THREADS + [transfers.work_on_write]
            self._threads += [
                threading.Thread(target=_work, args=(work,), name=f"engine-kv-{index}", daemon=True)
                for index, work in enumerate(works)
            ]

    def warm_up(self, work: Work, fidelities: Sequence[Fidelity]) -> None:
        """Before `start`: compute what kernels must be compiled and graphs recorded for, to serve such requests. Shows
        how far it is; nothing is left of it. Raises InternalError if this rank cannot compute."""
        assert not self._running, "the engine belongs to another thread now"
        with ProgressReport("warm-up", unit="batches", say=log.info, clock=self._clock) as warming:
            warm_up(
                self._engine,
                self._model,
                self._options,
                fidelities=fidelities,
                work=work,
                progress=warming.note,
            )
            warming.finish()

    def start(self, *, threads: bool = True) -> None:
        """Start the loop and the workers. Once. Without `threads` the caller is both: it calls `receive`, then `step`,
        when the rank `has_work`, and does the work of `transfers`, all on one thread."""
        self._running = True
        if not threads:
            self._threads = []
        for thread in self._threads:
            thread.start()

    @property
    def transfers(self) -> Transfers | None:
        """What is to be done for the store; None: there is none."""
        return self._engine.transfers

    @property
    def has_work(self) -> bool:
        """A message or an answer has come, or a step would do something now."""
        return bool(self._inbox or self._answers) or self._patience_s() <= 0

    def check(self) -> None:
        """Assert that blocks and slots are conserved. On the loop's thread."""
        self._engine.check()

    def give_back(self) -> None:
        """End every request with DrainingError: others take them over from what they have left in the store. None is
        accepted any more. Idempotent; a rank that has failed has ended them otherwise."""
        with self._changed:
            if self.alive:
                self._end_all(DrainingError("this rank is stopping"))
                self._changed.notify_all()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """`give_back`, then end the threads. Idempotent."""
        self.give_back()
        for thread in self._threads if self._running else ():
            thread.join(timeout_s)
        if not self._threads:
            self._engine.close()

    def submit(self, request: EngineRequest) -> None:
        """Accept a request; its events follow on `on_step`. Returns at once.

        A higher attempt of a request that is here ends the lower one with StaleAttemptError. Raises, and then nothing
        follows: CapacityError (queue or soft slots full), ContextLengthError, InvalidFieldError, StaleAttemptError,
        WorkerLostError (not running).
        """
        self._engine.checks.check(request)
        with self._changed:
            if not self.alive:
                raise WorkerLostError("this rank is not running")
            known = self._attempts.get(request.request_id)
            if known is not None and known >= request.attempt:
                raise StaleAttemptError(f"attempt {request.attempt} comes after attempt {known}")
            self._counts.accept_or_raise(request, self._options)
            self._unfinished[request.request_id, request.attempt] = None
            self._remember(request)
            if known is not None:
                stale = StaleAttemptError("a newer attempt has taken over")
                self._post(lambda: self._engine.fail(request.request_id, known, stale))
            self._post(lambda: self._engine.submit(request))

    def cancel(self, request_id: RequestId, attempt: int, *, goes_on: bool = False) -> None:
        """Drop a request. When this has returned, nothing more is reported for it. Unknown or ended: does nothing.
        `goes_on`: another rank may take it over."""
        key = (request_id, attempt)
        with self._changed:
            if self.alive and self._unfinished.pop(key, key) is None:
                self._muted.add(key)
                self._post(lambda: self._drop(key, goes_on=goes_on))

    def abandon(self, request_id: RequestId, attempt: int) -> None:
        """Remove what this request has handed off: whoever was to read it will not."""
        if self._engine.transfers is not None:
            self._engine.transfers.unlink(handoff_snapshot_key(request_id, attempt))

    def hand_off(self, request_id: RequestId, attempt: int, handoff: Handoff) -> None:
        """What the prefill rank left for a request submitted with `await_handoff`. Not stored or boundary 0: the prompt
        is computed here. Unknown, ended or repeated: does nothing."""
        with self._changed:
            if self.alive:
                self._post(lambda: self._engine.hand_off(request_id, attempt, handoff))

    def load(self) -> RankLoad:
        """As of the last step; never waits."""
        return self._load

    @property
    def write_queue_bytes(self) -> int:
        """Of state that waits to be stored."""
        transfers = self._engine.transfers
        return 0 if transfers is None else transfers.queued_bytes

    @property
    def preempted(self) -> int:
        """How often a request had to give up what it held."""
        return self._engine.preempted

    @property
    def limits(self) -> RankLimits:
        return self._limits

    @property
    def memory(self) -> MemoryPlan:
        """What the rank's memory is spent on; `str()` of it is for people."""
        return self._engine.memory

    @property
    def alive(self) -> bool:
        """Started, not stopped and not failed."""
        return self._running and not self._stopping

    def _remember(self, request: EngineRequest) -> None:
        self._attempts[request.request_id] = request.attempt
        self._attempts.move_to_end(request.request_id)
        while len(self._attempts) > ATTEMPTS_REMEMBERED + len(self._unfinished):
            request_id, attempt = self._attempts.popitem(last=False)
            if (request_id, attempt) in self._unfinished:  # a newer attempt will have to end it
                self._attempts[request_id] = attempt

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        self._changed.notify_all()

    def _deliver(self, answer: Delivery) -> None:
        """On a worker's thread."""
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()

    def _loop(self) -> None:
        try:
            while self.receive(wait=True):
                self.step()
        except BaseException as error:
            log.critical("the engine's loop failed", exc_info=error)
            self._end_all(WorkerLostError("this rank has failed"))
            if self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._engine.close()

    def receive(self, *, wait: bool = False) -> bool:
        """Hand what has come to the engine; with `wait`, once there is something to do. False: stop."""
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._inbox or self._answers or self._stopping, timeout=self._patience_s()
                )
            if self._stopping:
                return False
            while self._inbox:
                self._inbox.popleft()()
            self._counts = _Counts(*self._engine.waiting_counts())
            answers, self._answers = self._answers, deque()
        for answer in answers:
            self._engine.answer(answer)
        return True

    def _patience_s(self) -> float:
        if self._engine.runnable:
            return 0.0
        deadline_s = self._engine.next_deadline_s()
        return IDLE_S_MAX if deadline_s is None else min(deadline_s, IDLE_S_MAX)

    def step(self) -> None:
        """One step of the engine; what it produced is told."""
        events = self._engine.step()
        for work in self._engine.take_works():
            if self._on_work is not None:
                self._on_work(work)
        self._load = self._engine.load()
        with self._changed:
            self._report(events)
            # Whatever the engine had to say about these before they were dropped came with this step.
            self._muted.difference_update(self._dropped)
            self._dropped.clear()

    def _drop(self, key: Key, *, goes_on: bool) -> None:
        self._engine.cancel(*key, goes_on=goes_on)
        self._dropped.append(key)

    def _report(self, events: Sequence[StepEvent]) -> None:
        """Nothing is reported for a request whose cancellation has been acknowledged."""
        heard: list[StepEvent] = []
        with self._changed:
            for event in events:
                key = (event.request_id, event.attempt)
                if key in self._muted:
                    if isinstance(event, HandoffEvent) and event.handoff.stored:
                        self.abandon(*key)
                    continue
                heard.append(event)
                if isinstance(event, FinishedEvent):
                    self._unfinished.pop(key, None)
            if heard:
                self._on_step(heard)

    def _end_all(self, error: UnavailableError) -> None:
        """Nothing follows, whatever a step that runs has computed meanwhile."""
        with self._changed:
            self._stopping = True
            ended = list(self._unfinished)
            self._report([FinishedEvent(*key, FinishReason.ERROR, error=error) for key in ended])
            self._muted.update(ended)


@dataclass(slots=True)
class _Counts:
    """Accepted requests that hold nothing yet, at most: admissions since the last look are not counted off."""

    waiting: int = 0
    awaiting: int = 0

    def accept_or_raise(self, request: EngineRequest, options: RankOptions) -> None:
        if self.waiting >= options.waiting_max:
            raise CapacityError(f"this rank's queue is full ({options.waiting_max} requests)")
        if request.await_handoff and self.awaiting >= options.soft_slots:
            raise CapacityError(f"this rank's soft slots are taken ({options.soft_slots})")
        self.waiting += 1
        self.awaiting += request.await_handoff


def _work(work: Callable[..., bool]) -> None:
    while work(wait=True):
        pass
