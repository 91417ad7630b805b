"""`DecodeService`: one stream per router, one message per engine step for all its requests.

Translates, calls the engine, and translates back. A stream owns its requests: when it breaks, they are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.rank_process import RankContext
from whalepod.cluster.step_message import DecodeEvent, encode_step
from whalepod.cluster.ticket_gate import TicketGate, claimed_identity
from whalepod.cluster.wire import handoff_from_proto
from whalepod.core.errors import AuthenticationError, CapacityError, DrainingError, InternalError, ServingError
from whalepod.core.ids import RequestId
from whalepod.core.tracing import Span, start_span
from whalepod.engine.interface import (
    EngineRequest,
    FinishedEvent,
    FinishReason,
    Handoff,
    HandoffEvent,
    RankLoad,
    StepEvent,
    Work,
)
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

MESSAGES_WAITING_MAX = 4096
"""Steps a router may lag behind. More, and it cannot be reading: its stream is broken off."""

NOTHING_HANDED_OFF = Handoff(boundary_tokens=0, kind=None, stored=False, prefilled=False)

Key = tuple[RequestId, int]


class RouterStream:
    """What waits to be sent to one router, and the requests it owns."""

    def __init__(self) -> None:
        self.live: dict[Key, None] = {}
        self.reading = True
        self.broken = False
        self._messages: asyncio.Queue[bytes | ServingError | None] = asyncio.Queue()

    def send(self, message: bytes) -> None:
        if self._messages.qsize() >= MESSAGES_WAITING_MAX:
            self.break_off(CapacityError(f"the router is {MESSAGES_WAITING_MAX} steps behind"))
        elif not self.broken:
            self._messages.put_nowait(message)

    def break_off(self, error: ServingError) -> None:
        """End the stream with a status, after what is waiting. Nothing follows."""
        if not self.broken:
            self.broken = True
            self._messages.put_nowait(error)

    def end_if_idle(self) -> None:
        """End the stream well, once the router has nothing more to say and nothing to wait for."""
        if not self.reading and not self.live:
            self._messages.put_nowait(None)

    async def next_message(self) -> bytes | ServingError | None:
        return await self._messages.get()


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Everything runs on one event loop, so no two messages about a request are handled at a time."""

    name = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name

    def __init__(self, context: RankContext) -> None:
        self._engine = context.engine
        self._rank_id = context.identity.rank_id
        self._streams: dict[RouterStream, None] = {}
        self._gate = TicketGate(
            rank_id=context.identity.rank_id,
            work=Work.GENERATE,
            model_name=context.identity.model_name,
            namespace=context.namespace,
            fidelities=context.fidelities,
            secret=context.secret,
            clock=context.clock,
        )
        self._owners: dict[Key, RouterStream] = {}
        self._spans: dict[Key, Span] = {}

    @property
    def requests_live(self) -> int:
        return len(self._owners)

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def start_draining(self) -> None:
        self._gate.closed = True
        for stream in self._streams:
            self._part_if_done(stream)

    def _part_if_done(self, stream: RouterStream) -> None:
        """A router for which a draining rank has no more to do hears so on the stream: the rank may be gone before it
        is asked how it is."""
        if self._gate.closed and not stream.live:
            stream.break_off(DrainingError(f"{self._rank_id} is draining"))

    async def Generate(  # noqa: N802  the RPC's name
        self,
        request_iterator: AsyncIterator[decode_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateResponse],
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        stream = RouterStream()
        self._streams[stream] = None
        reader = asyncio.create_task(self._read(request_iterator, stream))
        reader.add_done_callback(lambda task: _break_off_if_failed(task, stream))
        try:
            while (message := await stream.next_message()) is not None:
                if isinstance(message, ServingError):
                    status, text, metadata = status_of_error(message)
                    await context.abort(status, text, metadata)
                yield decode_pb2.GenerateResponse(packed_step=message)
        finally:
            reader.cancel()
            del self._streams[stream]
            self._drop_all(stream)

    def deliver(self, events: Sequence[StepEvent], load: RankLoad) -> None:
        by_stream: dict[RouterStream, list[DecodeEvent]] = {}
        for event in events:
            assert not isinstance(event, HandoffEvent), "a decode rank hands nothing off"
            key = (event.request_id, event.attempt)
            stream = self._owners.get(key)
            if stream is None:
                continue  # cancelled in the meantime
            by_stream.setdefault(stream, []).append(event)
            if isinstance(event, FinishedEvent):
                self._spans[key].set(reason=event.reason.value)
                self._disown(key)
        for stream, its_events in by_stream.items():
            stream.send(encode_step(its_events, load))
            stream.end_if_idle()
            if stream.broken:
                self._drop_all(stream)
            self._part_if_done(stream)

    async def _read(self, requests: AsyncIterator[decode_pb2.GenerateRequest], stream: RouterStream) -> None:
        async for request in requests:
            for one in (request, *request.more):
                self._take(one, stream)
        stream.reading = False
        stream.end_if_idle()

    def _take(self, request: decode_pb2.GenerateRequest, stream: RouterStream) -> None:
        match request.WhichOneof("kind"):
            case "start":
                self._start(request.start, stream)
            case "ready":
                self._ready(request.ready, stream)
            case "cancel":
                self._cancel(request.cancel, stream)
            case _:
                pass  # a kind of tomorrow

    def _start(self, start: decode_pb2.Start, stream: RouterStream) -> None:
        claimed = claimed_identity(start.ticket)
        if claimed is None:
            stream.break_off(AuthenticationError("a ticket cannot be parsed"))
            return
        if self._owners.get(claimed) is stream:
            return  # repeated
        try:
            request = self._gate.admit_or_raise(start.ticket)
            self._submit(claimed, request, stream)
        except ServingError as error:
            stream.send(encode_step([_failed(claimed, error)], self._engine.load()))

    def _submit(self, key: Key, request: EngineRequest, stream: RouterStream) -> None:
        """Only what the gate has admitted gets here, and once: whoever merely names a live request does not own it."""
        assert key not in self._owners
        self._owners[key] = stream
        stream.live[key] = None
        decode = start_span("decode", request.traceparent, attributes={"prompt_tokens": len(request.prompt_ids)})
        self._spans[key] = decode
        try:
            self._engine.submit(replace(request, traceparent=decode.traceparent))
        except ServingError:
            self._disown(key)
            raise

    def _ready(self, ready: decode_pb2.Ready, stream: RouterStream) -> None:
        key = (RequestId(ready.request_id), ready.attempt)
        if self._owners.get(key) is stream:
            try:
                handoff = handoff_from_proto(ready.result) if ready.HasField("result") else NOTHING_HANDED_OFF
            except ServingError as error:
                self._drop(key)
                stream.send(encode_step([_failed(key, error)], self._engine.load()))
                return
            self._spans[key].note("handed off" if handoff.stored else "computed here")
            self._engine.hand_off(*key, handoff)

    def _cancel(self, cancel: decode_pb2.Cancel, stream: RouterStream) -> None:
        key = (RequestId(cancel.request_id), cancel.attempt)
        if self._owners.get(key) is stream:
            self._drop(key)
            self._part_if_done(stream)

    def _drop(self, key: Key, *, goes_on: bool = False) -> None:
        """Nobody waits for this attempt any more."""
        self._disown(key)
        self._engine.cancel(*key, goes_on=goes_on)

    def _drop_all(self, stream: RouterStream) -> None:
        """The router is gone, or takes this rank to be: then it goes on elsewhere."""
        for key in list(stream.live):
            self._drop(key, goes_on=True)

    def _disown(self, key: Key) -> None:
        stream = self._owners.pop(key, None)
        if stream is not None:
            stream.live.pop(key, None)
            self._spans.pop(key).end()


def _failed(key: Key, error: ServingError) -> FinishedEvent:
    return FinishedEvent(*key, reason=FinishReason.ERROR, error=error)


def _break_off_if_failed(reader: asyncio.Task[None], stream: RouterStream) -> None:
    """A bug in handling one message must not leave a stream that nobody reads."""
    error = None if reader.cancelled() else reader.exception()
    if error is not None and not stream.broken:  # else it only noticed that the stream is over
        log.error("a router's message could not be handled", exc_info=error)
        stream.break_off(InternalError("a message could not be handled"))
