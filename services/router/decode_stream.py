"""The one stream between this router and one decode rank, shared by all their requests.

    open ──▶ start ──▶ (ready) ──▶ step messages ──▶ the request's inbox ──▶ finished | cancel
                                          stream breaks ──▶ WorkerLostError in every inbox

The stream opens with the first request and is replaced, after a pause that grows, when it has broken. What arrives for
a request that is not open here, or for another attempt of it, is dropped: that is the fence against late answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import grpc

from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.peer_tls import Dialler, open_channel
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.step_message import DecodeEvent, StepMessageError, decode_step
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import DrainingError, ServingError, WorkerLostError
from whalepod.core.ids import Incarnation, RankId, RequestId
from whalepod.engine.interface import FinishedEvent, RankLoad, TokensEvent
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.rpc.prefill.v1 import prefill_pb2

from .relay import Relay
from .router_metrics import STREAMS_LOST

log = logging.getLogger(__name__)

PAUSE_S_FIRST = 0.05
PAUSE_S_MAX = 2.0
PAUSE_FORGOTTEN_S = 60.0
"""A rank that has been well, or gone, for so long begins anew."""

BATCH_BYTES_MAX = 64 * 1024
"""Of messages that go together: each but the first is encoded and decoded on its way there."""

PART_REQUESTS = 32
"""Requests that are told of a step at a time: a millisecond of writing to clients."""

STEPS_TAKEN_MAX = 64
"""Steps that a reader who is late is given at a time: what they become is encoded in one go."""

Key = tuple[RequestId, int]


class Inbox:
    """What happens to one attempt, in order, for the one task that reads it. It holds at most what the request may
    generate."""

    def __init__(self) -> None:
        self.heard = False
        """Whether the rank has said anything of the attempt."""
        self.relay: Relay[TokensEvent] | None = None
        """Takes tokens in place of a reader that waits."""
        self._items: list[object] = []
        self._far_behind = False
        """The last `take` left something."""
        self._arrival: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not self._items

    def put(self, item: object) -> None:
        arrival = self._arrival
        if arrival is None or arrival.done():  # the reader is busy, or gone
            self._items.append(item)
            return
        relay = self.relay
        if relay is not None and isinstance(item, TokensEvent) and relay.is_open():
            try:
                relay.push(item)
                return
            except Exception as error:  # noqa: BLE001  the reader raises it: others share the stream
                item = error
        self._items.append(item)
        arrival.set_result(None)

    async def take(self) -> list[object]:
        """What has come, once there is something. Tokens of steps that gathered are one event: what a token costs is
        its chunk and its write, so a reader that is behind catches up. One that is far behind does so bit by bit."""
        if not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        elif self._far_behind:
            await asyncio.sleep(0)
        items, self._items = self._items[:STEPS_TAKEN_MAX], self._items[STEPS_TAKEN_MAX:]
        self._far_behind = bool(self._items)
        return items if len(items) == 1 else _joined(items)


class DecodeStream:
    """One open stream to one incarnation of a rank. Dead once it has broken."""

    def __init__(
        self,
        rank: RankInfo,
        *,
        on_load: Callable[[RankInfo, RankLoad], None],
        on_end: Callable[[DecodeStream, ServingError], None],
        tls: Dialler | None = None,
    ) -> None:
        self.rank = rank
        self._tls = tls
        self.answered = False
        """Whether a message has ever arrived."""
        self._on_load = on_load
        self._on_end = on_end
        self._inboxes: dict[Key, Inbox] = {}
        self._outbox: asyncio.Queue[decode_pb2.GenerateRequest] = asyncio.Queue()
        self._ended: ServingError | None = None
        self._task = asyncio.create_task(self._run(), name=f"decode-stream {rank.rank_id}")

    @property
    def alive(self) -> bool:
        return self._ended is None

    def start(self, request_id: RequestId, attempt: int, ticket: common_pb2.SignedTicket, inbox: Inbox) -> None:
        """Begin an attempt: events for it go to `inbox` from now on. Raises WorkerLostError if the stream is dead."""
        if self._ended is not None:
            raise WorkerLostError(str(self._ended))
        self._inboxes[request_id, attempt] = inbox
        message = decode_pb2.GenerateRequest()
        # Written where it is sent from: a message given to another one is encoded and decoded to get there.
        message.start.ticket.ticket, message.start.ticket.mac = ticket.ticket, ticket.mac
        self._outbox.put_nowait(message)

    def ready(self, request_id: RequestId, attempt: int, result: prefill_pb2.RunResponse | None) -> None:
        """Pass on what prefill left; None: the rank computes the prompt."""
        message = decode_pb2.Ready(request_id=request_id, attempt=attempt, result=result)
        self._outbox.put_nowait(decode_pb2.GenerateRequest(ready=message))

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Forget an attempt and tell the rank. Ended or unknown: does nothing."""
        if self._inboxes.pop((request_id, attempt), None) is not None and self.alive:
            message = decode_pb2.Cancel(request_id=request_id, attempt=attempt)
            self._outbox.put_nowait(decode_pb2.GenerateRequest(cancel=message))

    def give_up(self) -> None:
        """The rank is gone, though the stream has not noticed."""
        self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        error: ServingError = WorkerLostError(f"the stream to {self.rank.rank_id} was closed")
        try:
            async with open_channel(self.rank.address, self._tls) as channel:
                stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
                await self._talk(stub.Generate())
            error = WorkerLostError(f"{self.rank.rank_id} ended its stream")
        except grpc.aio.AioRpcError as failure:
            said = error_from_rpc(failure)
            lost = WorkerLostError(f"the stream to {self.rank.rank_id} broke: {said}")
            error = said if isinstance(said, DrainingError) else lost
        except StepMessageError as failure:
            error = WorkerLostError(f"{self.rank.rank_id} does not speak this protocol: {failure}")
        finally:
            self._end(error)

    async def _talk(self, call: Any) -> None:  # noqa: ANN401  a generic call of an untyped stub
        """Until the rank ends the stream. Raises AioRpcError when it breaks."""
        sender = asyncio.create_task(self._send(call))
        try:
            async for response in call:
                await self._deliver(response.packed_step)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)  # why a send failed, the reader knows too

    async def _send(self, call: Any) -> None:  # noqa: ANN401
        """What has gathered while one message was being written goes in the next one: each costs system calls here and
        there, whatever is in it."""
        message = await self._outbox.get()
        while True:
            following: decode_pb2.GenerateRequest | None = None
            size_bytes = message.ByteSize()
            while self.rank.reads_batches and following is None and not self._outbox.empty():
                other = self._outbox.get_nowait()
                size_bytes += other.ByteSize()
                if size_bytes <= BATCH_BYTES_MAX:
                    message.more.append(other)
                else:
                    following = other
            await call.write(message)
            message = following or await self._outbox.get()

    async def _deliver(self, packed_step: bytes) -> None:
        """In parts, between which the event loop sees to everything else: a step of hundreds of requests is many
        milliseconds of writing to clients. Who has had nothing yet comes first. What a step says of one request is told
        at once: of tokens that came without their end, another rank would be asked for more."""
        message = decode_step(packed_step)
        self.answered = True
        self._on_load(self.rank, message.load)
        said: dict[Key, list[DecodeEvent]] = {}
        for event in message.events:
            said.setdefault((event.request_id, event.attempt), []).append(event)
        first: list[Key] = []
        others: list[Key] = []
        for key in said:
            inbox = self._inboxes.get(key)
            if inbox is not None:
                (others if inbox.heard else first).append(key)
        for index, part in enumerate([*_parts(first), *_parts(others)]):
            if index:
                await asyncio.sleep(0)
            for key in part:
                self._tell(key, said[key])

    def _tell(self, key: Key, events: Sequence[DecodeEvent]) -> None:
        inbox = self._inboxes.get(key)
        if inbox is None:  # cancelled since the step came
            return
        inbox.heard = True
        for event in events:
            inbox.put(event)
            if isinstance(event, FinishedEvent):
                del self._inboxes[key]
                return

    def _end(self, error: ServingError) -> None:
        self._ended = error
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(error)
        self._on_end(self, error)


def _parts(keys: Sequence[Key]) -> list[Sequence[Key]]:
    return [keys[start : start + PART_REQUESTS] for start in range(0, len(keys), PART_REQUESTS)]


def _joined(items: Sequence[object]) -> list[object]:
    """The same with one event for the tokens of consecutive steps."""
    joined: list[object] = []
    for are_tokens, group in groupby(items, key=lambda item: isinstance(item, TokensEvent)):
        if not are_tokens:
            joined += group
            continue
        steps = cast("list[TokensEvent]", list(group))
        tokens = tuple(token for step in steps for token in step.tokens)
        cached = [step.cached_tokens for step in steps if step.cached_tokens is not None]
        joined.append(steps[0]._replace(tokens=tokens, cached_tokens=cached[-1] if cached else None))
    return joined


class DecodeStreams:
    """The streams of one router, one for each decode rank that has work. For one event loop."""

    def __init__(
        self,
        *,
        on_load: Callable[[RankInfo, RankLoad], None],
        on_lost: Callable[[RankInfo], None],
        on_draining: Callable[[RankInfo], None] = lambda _: None,
        tls: Dialler | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._tls = tls
        self._clock = clock
        self._streams: dict[tuple[RankId, Incarnation], DecodeStream] = {}
        self._pauses: dict[tuple[RankId, Incarnation], tuple[float, float]] = {}  # length, end
        self._closing = False

    def usable(self, rank: RankInfo) -> bool:
        """False while the pause after a broken stream lasts."""
        _, until_s = self._pauses.get((rank.rank_id, rank.incarnation), (0.0, 0.0))
        return self._clock.monotonic_s() >= until_s

    def stream_to(self, rank: RankInfo) -> DecodeStream:
        """The stream to this incarnation of the rank, opened if there is none."""
        key = (rank.rank_id, rank.incarnation)
        stream = self._streams.get(key)
        if stream is None:
            stream = DecodeStream(rank, on_load=self._on_load, on_end=self._ended, tls=self._tls)
            self._streams[key] = stream
        return stream

    def give_up_gone(self, ranks: Mapping[RankId, RankInfo]) -> None:
        """Break the streams to ranks that are not among `ranks`, or were restarted: a process that is stopped, or cut
        off, keeps its connections."""
        for stream in list(self._streams.values()):
            now = ranks.get(stream.rank.rank_id)
            if now is None or now.incarnation != stream.rank.incarnation:
                stream.give_up()

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*(stream.close() for stream in list(self._streams.values())))

    def _ended(self, stream: DecodeStream, error: ServingError) -> None:
        rank = stream.rank
        key = (rank.rank_id, rank.incarnation)
        self._streams.pop(key, None)
        if self._closing:
            return
        if isinstance(error, DrainingError):
            self._on_draining(rank)
            return
        STREAMS_LOST.inc()
        log.warning("decode stream lost: %s", error, extra={"rank": rank.rank_id})
        length_s, _ = self._pauses.get(key, (0.0, 0.0))
        length_s = PAUSE_S_FIRST if stream.answered else min(max(PAUSE_S_FIRST, 2 * length_s), PAUSE_S_MAX)
        now_s = self._clock.monotonic_s()
        self._pauses = {old: pause for old, pause in self._pauses.items() if pause[1] > now_s - PAUSE_FORGOTTEN_S}
        self._pauses[key] = (length_s, now_s + length_s)
        self._on_lost(rank)
