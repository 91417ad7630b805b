"""From a job to its tokens, whatever happens on the way: place, attempt, and attempt again after what was sent.

A rank that fails costs the client time and never a wrong token: the request goes on elsewhere as a new attempt, fenced
by its number, that resumes after the tokens the client has. Nothing is repeated: what an old attempt still says is
dropped. A rank that is full or drains has not failed: when all are full, or are being replaced, the request waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from whalepod.cluster.error_codes import kind_of_error
from whalepod.cluster.registration import RankInfo
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import CapacityError, DrainingError, UnavailableError
from whalepod.core.ids import RankId
from whalepod.core.tracing import start_span
from whalepod.model.config import ModelConfig

from .attempt import Attempt, Legs, PrefillLostError
from .decode_stream import DecodeStreams
from .job import Burst, Ending, Job, Progress, Scores, sign_job
from .placer import Placer
from .prefill_client import PrefillClient
from .rank_table import RankTable
from .relay import Relay
from .router_metrics import FAILOVER_SECONDS, FAILOVERS, RETRIES
from .vision_ahead import VisionAhead, images_to_compute

log = logging.getLogger(__name__)

FULL_PAUSE_S_FIRST = 0.1
FULL_PAUSE_S_MAX = 1.0
"""Between two attempts at ranks that were all full: it grows, because each costs them a refusal."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    retry_max: int = 2
    """Further attempts after one that was lost, counted anew whenever tokens have come. A refusal for lack of room, or
    by a rank that drains, is no loss."""
    room_wait_s: float = 30.0
    """How long a request waits for room on ranks that are full, and for the successors of ranks that drain."""


@dataclass(slots=True)
class _Setbacks:
    """What has gone wrong for one request since it last had tokens."""

    deadline: Deadline
    room_wait_s: float
    avoid: set[RankId] = field(default_factory=set)
    lost: int = 0
    pause_s: float = FULL_PAUSE_S_FIRST
    _patience: Deadline | None = None

    @property
    def patience(self) -> Deadline:
        """For room, and for successors: from when the first was missed."""
        if self._patience is None:
            self._patience = self.deadline.earlier(self.room_wait_s)
        return self._patience

    def note_progress(self) -> None:
        """Tokens came: the attempt was no failure, whatever becomes of it."""
        self.lost, self._patience = 0, None
        self.avoid.clear()

    def may_try_again(self, error: UnavailableError, legs: Legs, *, retry_max: int) -> bool:
        """Note that an attempt ended so. Whether another is worth making."""
        self.avoid.add(error.rank_id if isinstance(error, PrefillLostError) else legs.decode.rank_id)
        if isinstance(error, CapacityError | DrainingError):
            return not self.patience.expired
        self.lost += 1
        return self.lost <= retry_max

    def next_pause_s(self) -> float:
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, FULL_PAUSE_S_MAX)
        return pause_s


@dataclass(slots=True)
class _Sent:
    """What the client of a job has been sent, over all attempts."""

    job: Job
    clock: Clock
    ids: list[int] = field(default_factory=list)
    scored_to: int = 1
    """Prompt tokens before this position have been scored, or are the first, which has no score."""
    cached_tokens: int | None = None
    """R of the attempt that drew the first token: what later ones restore is no hit."""
    attempt: int = 0
    """The one that drew the last token."""
    broken_at_s: float | None = None
    broken_by: UnavailableError | None = None
    """What its stream last broke with."""

    @property
    def rest(self) -> Job:
        """What is left to do. Scores of the prompt came before the first token, and do not come again."""
        return replace(self.job, resumed_ids=tuple(self.ids)) if self.ids else self.job

    def note(self, item: Scores | Ending) -> Scores | Ending:
        """The item as the client is to see it: an attempt that begins anew scores the prompt anew."""
        if isinstance(item, Scores):
            told, self.scored_to = self.scored_to - item.start, max(self.scored_to, item.start + len(item.tokens))
            return replace(item, start=item.start + max(0, told), tokens=item.tokens[max(0, told) :])
        return replace(item, cached_tokens=self._told_of_cached(item))

    def note_burst(self, burst: Burst) -> Burst:
        """The same of a burst, which is what most items are."""
        self.ids += [token.id for token in burst.tokens]
        if self.broken_at_s is not None:
            FAILOVER_SECONDS.observe(self.clock.monotonic_s() - self.broken_at_s)
            self.broken_at_s = None
        cached_tokens = self._told_of_cached(burst)
        return burst if burst.cached_tokens == cached_tokens else burst._replace(cached_tokens=cached_tokens)

    def _told_of_cached(self, item: Burst | Ending) -> int:
        if self.cached_tokens is None:
            self.cached_tokens = item.cached_tokens
        return self.cached_tokens

    def note_break(self, error: UnavailableError) -> None:
        """The attempt that served it was lost."""
        if self.ids and self.broken_at_s is None:
            self.broken_at_s = self.clock.monotonic_s()
            self.broken_by = error
            FAILOVERS.inc()


class Dispatcher:
    """Runs jobs on the ranks of a table. For one event loop."""

    def __init__(
        self,
        table: RankTable,
        streams: DecodeStreams,
        prefills: PrefillClient,
        placer: Placer,
        vision: VisionAhead,
        *,
        model: ModelConfig,
        options: DispatchOptions,
        secret: ClusterSecret,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._table = table
        self._streams = streams
        self._prefills = prefills
        self._placer = placer
        self._vision = vision
        self._model = model
        self._options = options
        self._secret = secret
        self._clock = clock

    async def generate(
        self,
        job: Job,
        *,
        on_burst: Callable[[Burst], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
        relay: Relay[Burst] | None = None,
    ) -> AsyncGenerator[Progress, None]:
        """Yields bursts of tokens, then one ending. Close it (`aclosing`) to stop the request on every rank.
        `on_burst` sees each burst that has tokens, before it is yielded; `on_lost` hears when an attempt that had drawn
        some is lost and another one follows. While it is open, `relay` is given bursts that would be yielded, but for
        an attempt's first.

        Raises UnavailableError if no rank can take the request or it was lost once too often, DeadlineError, and what
        the ranks say themselves: RequestError, InternalError.
        """
        setbacks = _Setbacks(job.deadline, self._options.room_wait_s)
        sent = _Sent(job, self._clock)

        def note_burst(burst: Burst) -> Burst:
            burst = sent.note_burst(burst)
            if burst.tokens:
                on_burst(burst)
            return burst

        self._placer.begin(job)
        try:
            for number in count(1):
                try:
                    wait = setbacks.patience if self._table.awaits_successor() else None
                    rest, legs = await self._placer.place(sent.rest, number, setbacks.avoid, wait=wait)
                except UnavailableError as error:
                    raise sent.broken_by or error from None
                attempt = start_span("attempt", job.traceparent, attributes={"number": number, **legs.names})
                try:
                    if attempt.traceparent != rest.traceparent:
                        rest = replace(rest, traceparent=attempt.traceparent)
                    vision = self._table.vision_ranks() if job.images else []
                    running = self._attempt(rest, number, legs, vision)
                    async with self._encoding_ahead(rest, vision), aclosing(running.run()) as progress:
                        async for item in progress:
                            setbacks.note_progress()
                            if number != sent.attempt:
                                sent.attempt = number
                                self._placer.note_generated(job, legs.decode.rank_id)
                                if relay is not None:
                                    running.relay_to(relay.through(note_burst))
                            yield note_burst(item) if isinstance(item, Burst) else sent.note(item)
                    return
                except UnavailableError as error:
                    attempt.fail(kind_of_error(error))
                    all_were_full = self._full_or_raise(error, job, number, legs, setbacks, sent)
                    if sent.ids:
                        on_lost()
                finally:
                    legs.release()  # here, because an attempt that never began runs nothing of its own
                    attempt.end()
                if all_were_full:
                    await self._wait_for_room(setbacks)
        finally:
            self._placer.end(job)

    def _full_or_raise(
        self, error: UnavailableError, job: Job, number: int, legs: Legs, setbacks: _Setbacks, sent: _Sent
    ) -> bool:
        """An attempt was lost: whether for lack of room. Raises the error if no other is worth making."""
        if isinstance(error, DrainingError):
            self._table.note_draining(legs.decode)
        sent.note_break(error)
        if not setbacks.may_try_again(error, legs, retry_max=self._options.retry_max):
            raise error
        RETRIES.labels(kind_of_error(error)).inc()
        log.warning("attempt lost: %s", error, extra={"internal_id": job.request_id, "attempt": number})
        return isinstance(error, CapacityError)

    async def _wait_for_room(self, setbacks: _Setbacks) -> None:
        """Returns at once if there is a decode rank that has not been tried."""
        if all(rank.rank_id in setbacks.avoid for rank in self._table.decode_ranks()):
            pause = setbacks.patience.earlier(setbacks.next_pause_s())
            await self._table.wait_for_change(pause)
            setbacks.avoid.clear()

    def _attempt(self, job: Job, number: int, legs: Legs, vision: Sequence[RankInfo]) -> Attempt:
        sign = partial(
            sign_job,
            job,
            attempt=number,
            decode=legs.decode,
            prefill=legs.prefill,
            vision=vision,
            secret=self._secret,
            clock=self._clock,
        )
        return Attempt(
            job,
            number,
            legs,
            sign=sign,
            stream=self._streams.stream_to(legs.decode),
            prefills=self._prefills,
        )

    def _encoding_ahead(self, job: Job, ranks: Sequence[RankInfo]) -> AbstractAsyncContextManager[None]:
        """Of the choices of one prompt, the first asks for all."""
        images = images_to_compute(
            () if job.branch else job.images,
            stored_tokens=job.stored_tokens,
            prompt_tokens=job.tokens,
            kept_rows=self._model.kept_rows,
            window=self._model.window,
        )
        return self._vision.asking(images, ranks, deadline=job.deadline, traceparent=job.traceparent)
