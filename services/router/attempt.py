"""One attempt at one request: two legs, one inbox, one way out.

    start ─▶ decode rank (soft slot)          prefill rank ─▶ READY ─▶ ready ─▶ decode rank ─▶ tokens … finished
                 └───────── events ──▶ inbox ◀── PrefillDone | PrefillFailed

Leaving it, for whatever reason, cancels what is left of both legs at once. Whoever made the legs releases them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from whalepod.cluster.registration import RankInfo
from whalepod.cluster.wire import handoff_from_proto
from whalepod.core.clock import Deadline
from whalepod.core.errors import (
    AuthenticationError,
    DeadlineError,
    InternalError,
    RequestError,
    ServingError,
    StaleAttemptError,
    WorkerLostError,
)
from whalepod.core.ids import RankId
from whalepod.engine.interface import FinishedEvent, FinishReason, PromptTokensEvent, TokensEvent
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2

from .decode_stream import DecodeStream, Inbox
from .job import Burst, Ending, Job, Progress, Route, Scores
from .prefill_client import PrefillClient
from .prompt_work import PromptWork
from .rank_table import Claim
from .relay import Relay
from .router_metrics import HANDOFFS

log = logging.getLogger(__name__)

SIGN_INLINE_TOKENS_MAX = 16_384


@dataclass(frozen=True, slots=True)
class PrefillDone:
    response: prefill_pb2.RunResponse


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    error: ServingError


class PrefillLostError(WorkerLostError):
    """The prefill leg failed, and another prefill rank is worth a new attempt."""

    def __init__(self, rank_id: RankId, cause: ServingError) -> None:
        super().__init__(f"prefill on {rank_id} failed: {cause}")
        self.rank_id = rank_id


@dataclass(frozen=True, slots=True)
class Legs:
    """Where an attempt runs, with the claims that count it there. `prefill` None: the decode rank does everything."""

    decode: RankInfo
    decode_claim: Claim
    prefill: RankInfo | None
    prefill_claim: Claim | None
    prefill_elsewhere: bool
    """Another prefill rank could take over: then a failed prefill ends the attempt, else the decode rank computes."""
    work: PromptWork

    @property
    def names(self) -> dict[str, str]:
        """Of the ranks, for traces."""
        return {"decode": self.decode.rank_id, "prefill": self.prefill.rank_id if self.prefill is not None else ""}

    def release_prefill(self) -> None:
        """The prefill rank has done its part, or failed. As `release`, it may be called twice."""
        if self.prefill_claim is not None:
            self.prefill_claim.release()

    def release(self) -> None:
        """The attempt is over, or never began: nothing is counted on a rank for it, and nobody waits for its prompt."""
        self.release_prefill()
        self.work.end()
        self.decode_claim.release()


class Attempt:
    """Runs one attempt. `run` once."""

    def __init__(
        self,
        job: Job,
        number: int,
        legs: Legs,
        *,
        sign: Callable[[], common_pb2.SignedTicket],
        stream: DecodeStream,
        prefills: PrefillClient,
    ) -> None:
        self._job = job
        self._number = number
        self._legs = legs
        self._sign = sign
        self._stream = stream
        self._prefills = prefills
        self._inbox = Inbox()
        self._prefill_task: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        """Rings at the deadline: one for all that is waited for."""
        self._restored_handoff = False
        self._cached_tokens = 0
        self._route = Route(decode_rank=legs.decode.rank_id, prefill_rank=None, attempts=number)

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Yields bursts, then one ending.

        Raises UnavailableError (worth another attempt if nothing was yielded), RequestError (a rank's own limits),
        DeadlineError, InternalError.
        """
        try:
            ticket = await self._ticket()
            self._stream.start(self._job.request_id, self._number, ticket, self._inbox)
            if self._legs.prefill is not None:
                self._prefill_task = asyncio.create_task(self._run_prefill(self._legs.prefill, ticket))
            self._alarm = asyncio.get_running_loop().call_later(self._job.deadline.remaining_s(), self._ring)
            while True:
                for item in await self._next_items(self._job.deadline):
                    for progress in self._handle(item):
                        yield progress
                        if isinstance(progress, Ending):
                            return
        finally:
            self._leave()

    def relay_to(self, relay: Relay[Burst]) -> None:
        """From now on it is given the bursts for which whoever iterates `run` would be woken."""
        self._inbox.relay = relay.through(self._burst)

    def _ring(self) -> None:
        self._inbox.put(_too_late())

    async def _next_items(self, deadline: Deadline) -> list[object]:
        if deadline.expired:  # a slow reader may have left so much here that nothing needs to be waited for
            raise _too_late()
        return await self._inbox.take()

    def _handle(self, item: object) -> list[Progress]:
        match item:
            case TokensEvent():
                return [self._burst(item)]
            case PromptTokensEvent():
                return [Scores(item.start, item.tokens, self._cached_tokens, self._route)]
            case FinishedEvent():
                return [self._ending_or_raise(item)]
            case PrefillDone():
                return self._take_handoff(item.response)
            case PrefillFailed():
                self._survive_prefill_or_raise(item.error)
                return []
            case Exception():
                raise item
            case _:
                raise AssertionError(f"unexpected item {item!r}")

    def _burst(self, event: TokensEvent) -> Burst:
        self._note_cached_tokens(event.cached_tokens)
        self._legs.work.note_token()
        self._legs.decode_claim.finish_prefill()
        return Burst(event.tokens, self._cached_tokens, self._route)

    def _take_handoff(self, response: prefill_pb2.RunResponse) -> list[Progress]:
        try:
            handoff = handoff_from_proto(response)
        except InternalError as error:
            self._survive_prefill_or_raise(error)
            return []
        assert self._legs.prefill is not None
        self._route = replace(self._route, prefill_rank=self._legs.prefill.rank_id)
        self._legs.release_prefill()
        self._legs.work.note_ready(stored=handoff.stored and handoff.boundary_tokens > 0)
        if handoff.finish_reason is not None and handoff.first_token is not None:
            # The first token ended the request: nothing is left for the decode rank, whose slot `_leave` frees.
            HANDOFFS.labels("finished_at_prefill").inc()
            burst = Burst((handoff.first_token,), handoff.cached_tokens, self._route)
            ending = Ending(handoff.finish_reason, handoff.matched_stop_id, handoff.cached_tokens, self._route)
            return [burst, ending]
        HANDOFFS.labels("handed_off" if handoff.stored and handoff.boundary_tokens else "not_stored").inc()
        if handoff.stored:
            self._restored_handoff = handoff.boundary_tokens > 0
            self._cached_tokens = handoff.cached_tokens
        self._stream.ready(self._job.request_id, self._number, response)
        return []

    def _survive_prefill_or_raise(self, error: ServingError) -> None:
        """The caller's fault stays the caller's; anything else is computed elsewhere."""
        self._legs.release_prefill()
        self._legs.work.end()
        assert self._legs.prefill is not None
        if isinstance(error, DeadlineError) or (
            isinstance(error, RequestError) and not isinstance(error, AuthenticationError)
        ):
            raise error
        HANDOFFS.labels("prefill_failed").inc()
        log.warning("prefill failed: %s", error, extra={"rank": self._legs.prefill.rank_id, **self._names})
        if self._legs.prefill_elsewhere:
            raise PrefillLostError(self._legs.prefill.rank_id, error)
        self._stream.ready(self._job.request_id, self._number, None)

    def _ending_or_raise(self, event: FinishedEvent) -> Ending:
        if event.reason is FinishReason.ABORT:
            raise WorkerLostError(f"{self._legs.decode.rank_id} gave the request up")
        if event.reason is FinishReason.ERROR:
            raise _as_ours(event.error or InternalError("a rank failed without saying why"))
        self._note_cached_tokens(event.cached_tokens)
        return Ending(event.reason, event.matched_stop_id, self._cached_tokens, self._route)

    def _note_cached_tokens(self, reported: int | None) -> None:
        """What a decode rank restored of a hand-off is no hit: there the prefill rank's R is the truth."""
        if reported is not None and not self._restored_handoff:
            self._cached_tokens = reported

    @property
    def _names(self) -> dict[str, object]:
        return {"internal_id": self._job.request_id, "attempt": self._number}

    async def _ticket(self) -> common_pb2.SignedTicket:
        """Of a long prompt, signed by a worker thread: a million ids take 10 ms, in which streams would stand still."""
        small = self._job.tokens <= SIGN_INLINE_TOKENS_MAX and not self._job.images
        return self._sign() if small else await asyncio.to_thread(self._sign)

    async def _run_prefill(self, rank: RankInfo, ticket: common_pb2.SignedTicket) -> None:
        try:
            response = await self._prefills.run(rank, ticket, deadline=self._job.deadline)
        except ServingError as error:
            self._inbox.put(PrefillFailed(error))
        else:
            self._inbox.put(PrefillDone(response))

    def _leave(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._prefill_task is not None:
            self._prefill_task.cancel()
        self._stream.cancel(self._job.request_id, self._number)


def _too_late() -> DeadlineError:
    return DeadlineError("the request's deadline passed before it was done")


def _as_ours(error: ServingError) -> ServingError:
    """A rank that does not believe our ticket, or knows a newer attempt, met a bug of ours, not one of the client's."""
    if isinstance(error, AuthenticationError | StaleAttemptError):
        return InternalError(f"a rank refused the request: {error}")
    return error
