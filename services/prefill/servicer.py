"""`PrefillService`: a ticket in, READY out. Translates, calls the engine, and translates back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import grpc

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.rank_process import RankContext
from whalepod.cluster.registration import RankRole
from whalepod.cluster.ticket_gate import TicketGate
from whalepod.cluster.wire import handoff_to_proto
from whalepod.core.errors import CancelledError, ServingError
from whalepod.core.ids import RequestId
from whalepod.core.tracing import span
from whalepod.engine.interface import (
    FinishedEvent,
    Handoff,
    HandoffEvent,
    PromptTokensEvent,
    RankLoad,
    StepEvent,
    TokensEvent,
    Work,
)
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc

Key = tuple[RequestId, int]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One call is one attempt: cancelling the call cancels the attempt."""

    name = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name

    def __init__(self, context: RankContext) -> None:
        self._engine = context.engine
        self._direct_address = context.direct_address
        self._gate = TicketGate(
            rank_id=context.identity.rank_id,
            work=Work.PREFILL,
            model_name=context.identity.model_name,
            namespace=context.namespace,
            fidelities=context.fidelities,
            secret=context.secret,
            clock=context.clock,
        )
        # Prompts come to the head of a group; the others compute them in its name.
        self._gate.closed = context.identity.role is RankRole.PREFILL_MEMBER
        self._waiters: dict[Key, asyncio.Future[Handoff]] = {}

    @property
    def requests_live(self) -> int:
        return len(self._waiters)

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def start_draining(self) -> None:
        self._gate.closed = True

    async def Run(  # noqa: N802  the RPC's name
        self,
        request: prefill_pb2.RunRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.RunRequest, prefill_pb2.RunResponse],
    ) -> prefill_pb2.RunResponse:
        try:
            handoff = await self._run(request)
        except ServingError as error:
            await _abort(context, error)
        return handoff_to_proto(replace(handoff, direct_address=self._direct_address), self._engine.load())

    async def _run(self, request: prefill_pb2.RunRequest) -> Handoff:
        work = self._gate.admit_or_raise(request.ticket)
        key = (work.request_id, work.attempt)
        waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        answered = False
        try:
            with span("prefill", work.traceparent, prompt_tokens=len(work.prompt_ids)) as prefill:
                self._engine.submit(replace(work, traceparent=prefill.traceparent))
                handoff = await waiter
                prefill.set(cached_tokens=handoff.cached_tokens, blocks_stored=handoff.blocks_stored)
            answered = True
            return handoff
        finally:
            del self._waiters[key]
            if waiter.cancelled():  # the caller is gone
                self._engine.cancel(*key)
            elif not answered and waiter.done() and waiter.exception() is None:  # it went as its answer came
                self._engine.abandon(*key)

    def deliver(self, events: Sequence[StepEvent], load: RankLoad) -> None:  # noqa: ARG002  each reply reads it anew
        for event in events:
            waiter = self._waiters.get((event.request_id, event.attempt))
            if waiter is None or waiter.done():
                continue
            match event:
                case HandoffEvent():
                    waiter.set_result(event.handoff)
                case FinishedEvent():
                    waiter.set_exception(event.error or CancelledError(f"the prefill ended with {event.reason.value}"))
                case TokensEvent() | PromptTokensEvent():
                    raise AssertionError("a prefill reports its first token in the hand-off")


async def _abort(
    context: grpc.aio.ServicerContext[prefill_pb2.RunRequest, prefill_pb2.RunResponse], error: ServingError
) -> NoReturn:
    status, message, metadata = status_of_error(error)
    await context.abort(status, message, metadata)
