"""One stream for many requests: each hears its own, and all hear when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from tests.services.router.fake_ranks import FakeServer
from tests.services.router.router_under_test import until
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.step_message import encode_step
from whalepod.core.errors import WorkerLostError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import FinishedEvent, FinishReason, RankLoad, SampledToken, StepEvent, TokensEvent
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.services.router.decode_stream import (
    BATCH_BYTES_MAX,
    PART_REQUESTS,
    PAUSE_S_MAX,
    STEPS_TAKEN_MAX,
    DecodeStreams,
    Inbox,
)

A, B = RequestId(b"a" * 16), RequestId(b"b" * 16)
TICKET = common_pb2.SignedTicket(ticket=b"t", mac=b"m")
END = FinishedEvent(A, 1, FinishReason.LENGTH)


class Puppet(decode_pb2_grpc.DecodeServiceServicer):
    """A decode rank that says what the test tells it to."""

    def __init__(self) -> None:
        self.heard: list[decode_pb2.GenerateRequest] = []
        self.streams = 0
        self.messages = 0
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.server = FakeServer("decode-0", RankRole.DECODE, self._register)

    def _register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Generate(
        self,
        request_iterator: AsyncIterator[decode_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        self.streams += 1
        self._out = asyncio.Queue()

        async def hear() -> None:
            async for request in request_iterator:
                self.messages += 1
                self.heard += [request, *request.more]

        hearing = asyncio.create_task(hear())
        try:
            while (data := await self._out.get()) is not None:
                yield decode_pb2.GenerateResponse(packed_step=data)
        finally:
            hearing.cancel()

    def say(self, *events: StepEvent, load: RankLoad | None = None) -> None:
        self._out.put_nowait(encode_step(events, load or RankLoad()))

    def say_bytes(self, data: bytes | None) -> None:
        self._out.put_nowait(data)


class StoppedClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


class World:
    def __init__(self, puppet: Puppet) -> None:
        self.puppet = puppet
        self.clock = StoppedClock()
        self.loads: list[RankLoad] = []
        self.lost: list[RankInfo] = []
        self.streams = DecodeStreams(
            on_load=lambda _, load: self.loads.append(load), on_lost=self.lost.append, clock=self.clock
        )

    async def start(self, request_id: RequestId, attempt: int = 1) -> Inbox:
        inbox = Inbox()
        heard = len(self.puppet.heard)
        self.streams.stream_to(self.puppet.server.info()).start(request_id, attempt, TICKET, inbox)
        await until(lambda: len(self.puppet.heard) > heard)
        return inbox


@asynccontextmanager
async def running_world() -> AsyncGenerator[World, None]:
    puppet = Puppet()
    await puppet.server.start()
    world = World(puppet)
    try:
        yield world
    finally:
        await world.streams.close()
        await puppet.server.kill()


def tokens(request_id: RequestId, *ids: int, attempt: int = 1) -> TokensEvent:
    return TokensEvent(request_id, attempt, tuple(SampledToken(token_id) for token_id in ids))


@pytest.mark.parametrize("reads_batches", [True, False], ids=["batches", "one by one"])
async def test_what_gathers_goes_in_one_message_to_ranks_that_read_it(reads_batches: bool) -> None:
    async with running_world() as world:
        stream = world.streams.stream_to(replace(world.puppet.server.info(), reads_batches=reads_batches))
        starts = [RequestId(bytes([index]) * 16) for index in range(20)]
        for request_id in starts:
            ticket = common_pb2.SignedTicket(ticket=request_id)
            stream.start(request_id, 1, ticket, Inbox())
        await until(lambda: len(world.puppet.heard) == 20)
        assert [one.start.ticket.ticket for one in world.puppet.heard] == starts
        assert (world.puppet.messages < 20) == reads_batches


async def test_requests_share_one_stream_and_hear_their_own_events() -> None:
    async with running_world() as world:
        inbox_a, inbox_b = await world.start(A), await world.start(B)
        world.puppet.say(tokens(A, 1), tokens(B, 2, 3), load=RankLoad(running=2))
        assert await inbox_a.take() == [tokens(A, 1)]
        assert await inbox_b.take() == [tokens(B, 2, 3)]
        assert world.puppet.streams == 1
        assert world.loads == [RankLoad(running=2)]


async def test_a_step_of_many_requests_is_told_in_parts_and_first_to_those_that_have_heard_nothing() -> None:
    async with running_world() as world:
        many = [RequestId(bytes([index]) * 16) for index in range(2 * PART_REQUESTS)]
        inboxes = [await world.start(request_id) for request_id in many]
        world.puppet.say(*(tokens(request_id, 1) for request_id in many))
        for request_id, inbox in zip(many, inboxes, strict=True):
            assert await inbox.take() == [tokens(request_id, 1)]
        newcomer = await world.start(A)
        world.puppet.say(*(tokens(request_id, 2) for request_id in many), tokens(A, 1), END)
        assert await newcomer.take() == [tokens(A, 1), END]
        assert all(inbox.empty for inbox in inboxes)
        async with asyncio.timeout(5):
            while all(inbox.empty for inbox in inboxes):
                await asyncio.sleep(0)
        assert any(inbox.empty for inbox in inboxes), "the step came in one piece"
        for request_id, inbox in zip(many, inboxes, strict=True):
            assert await inbox.take() == [tokens(request_id, 2)]


async def test_tokens_and_the_end_that_a_step_tells_of_a_request_are_told_together() -> None:
    """Wherever in the step they are: had a stream broken in between, another rank would be asked to go on."""
    async with running_world() as world:
        many = [RequestId(bytes([index]) * 16) for index in range(PART_REQUESTS - 1)]
        inboxes = [await world.start(request_id) for request_id in [*many, A]]
        world.puppet.say(*(tokens(request_id, 1) for request_id in [*many, A]))
        for inbox in inboxes:
            await inbox.take()
        world.puppet.say(*(tokens(request_id, 2) for request_id in [*many, A]), END)
        assert await inboxes[-1].take() == [tokens(A, 2), END]


async def test_a_large_message_is_sent_alone() -> None:
    async with running_world() as world:
        stream = world.streams.stream_to(world.puppet.server.info())
        tickets = [b"a", b"b" * BATCH_BYTES_MAX, b"c", b"d" * (BATCH_BYTES_MAX - 100), b"e" * 200]
        for index, ticket in enumerate(tickets):
            signed = common_pb2.SignedTicket(ticket=ticket)
            stream.start(RequestId(bytes([index]) * 16), 1, signed, Inbox())
        await until(lambda: len(world.puppet.heard) == len(tickets))
        assert [one.start.ticket.ticket for one in world.puppet.heard] == tickets
        assert not any(one.more for one in world.puppet.heard if len(one.start.ticket.ticket) > BATCH_BYTES_MAX)


async def test_a_reader_that_is_far_behind_catches_up_bit_by_bit() -> None:
    """Others have their turn in between: what thousands of tokens become is encoded in one go."""
    inbox = Inbox()
    ids = list(range(2 * STEPS_TAKEN_MAX + 1))
    for token_id in ids:
        inbox.put(tokens(A, token_id))
    inbox.put(END)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    got: list[object] = []
    seen: list[int] = []
    while END not in got:
        got += await inbox.take()
        seen.append(turns)
    counting.cancel()
    sizes = [len(event.tokens) for event in got if isinstance(event, TokensEvent)]
    assert sizes == [STEPS_TAKEN_MAX, STEPS_TAKEN_MAX, 1]
    assert [token.id for event in got if isinstance(event, TokensEvent) for token in event.tokens] == ids
    assert seen == sorted(set(seen)), "nobody else had a turn"


async def test_a_late_reader_gets_the_tokens_of_the_steps_that_gathered_as_those_of_one() -> None:
    inbox = Inbox()
    for item in (tokens(A, 1)._replace(cached_tokens=5), tokens(A, 2, 3), "ready", tokens(A, 4), tokens(A, 5), END):
        inbox.put(item)
    together = tokens(A, 1, 2, 3)._replace(cached_tokens=5)
    assert await inbox.take() == [together, "ready", tokens(A, 4, 5), END]
    assert inbox.empty


async def test_events_of_strangers_and_of_other_attempts_are_dropped() -> None:
    async with running_world() as world:
        inbox = await world.start(A, attempt=2)
        late = FinishedEvent(A, 1, FinishReason.STOP)
        world.puppet.say(tokens(B, 9), tokens(A, 8, attempt=1), late, tokens(A, 7, attempt=3), tokens(A, 1, attempt=2))
        assert await inbox.take() == [tokens(A, 1, attempt=2)]
        assert inbox.empty


async def test_nothing_is_heard_after_the_end_or_after_a_cancel() -> None:
    async with running_world() as world:
        inbox_a, inbox_b = await world.start(A), await world.start(B)
        end = FinishedEvent(A, 1, FinishReason.LENGTH)
        world.streams.stream_to(world.puppet.server.info()).cancel(B, 1)
        world.puppet.say(tokens(B, 5), end, tokens(A, 6), end)
        assert await inbox_a.take() == [end]
        marker = await world.start(RequestId(b"m" * 16))
        world.puppet.say(tokens(RequestId(b"m" * 16), 1))
        await marker.take()
        assert inbox_a.empty
        assert inbox_b.empty


async def test_a_cancel_is_told_once_and_only_for_what_still_runs() -> None:
    async with running_world() as world:
        inbox = await world.start(A)
        stream = world.streams.stream_to(world.puppet.server.info())
        world.puppet.say(FinishedEvent(A, 1, FinishReason.STOP))
        await inbox.take()
        stream.cancel(A, 1)
        await world.start(B)
        stream.cancel(B, 1)
        stream.cancel(B, 1)
        await until(lambda: len(world.puppet.heard) == 3)
        assert [request.WhichOneof("kind") for request in world.puppet.heard] == ["start", "start", "cancel"]
        assert world.puppet.heard[2].cancel.request_id == B


@pytest.mark.parametrize("how", ["killed", "ended", "malformed"])
async def test_a_stream_that_breaks_tells_every_request_and_the_table(how: str) -> None:
    async with running_world() as world:
        inboxes = [await world.start(A), await world.start(B)]
        if how == "killed":
            await world.puppet.server.kill()
        else:
            world.puppet.say_bytes(None if how == "ended" else b"\xc1junk")
        for inbox in inboxes:
            async with asyncio.timeout(5):
                assert [type(item) for item in await inbox.take()] == [WorkerLostError]
        assert [info.rank_id for info in world.lost] == ["decode-0"]


async def test_nobody_listening_is_told_to_the_request_that_asked() -> None:
    async with running_world() as world:
        info = world.puppet.server.info()
        await world.puppet.server.kill()
        inbox = Inbox()
        world.streams.stream_to(info).start(A, 1, TICKET, inbox)
        async with asyncio.timeout(5):
            assert [type(item) for item in await inbox.take()] == [WorkerLostError]


async def test_a_broken_stream_is_replaced_after_a_pause_that_grows_and_ends() -> None:
    async with running_world() as world:
        info = world.puppet.server.info()
        await world.puppet.server.kill()
        pauses: list[float] = []
        for _ in range(9):
            assert world.streams.usable(info)
            inbox = Inbox()
            world.streams.stream_to(info).start(A, 1, TICKET, inbox)
            await inbox.take()
            before = world.clock.now_s
            while not world.streams.usable(info):
                world.clock.now_s += 0.01
            pauses.append(world.clock.now_s - before)
        assert pauses == sorted(pauses)
        assert pauses[0] < 0.1
        assert pauses[-1] <= PAUSE_S_MAX + 0.02


async def test_a_stream_that_had_worked_pauses_only_shortly() -> None:
    async with running_world() as world:
        inbox = await world.start(A)
        world.puppet.say(tokens(A, 1))
        await inbox.take()
        world.puppet.say_bytes(None)
        await inbox.take()
        world.clock.now_s += 0.06
        info = world.puppet.server.info()
        assert world.streams.usable(info)
        again = await world.start(A, attempt=2)
        world.puppet.say(tokens(A, 2, attempt=2))
        assert await again.take() == [tokens(A, 2, attempt=2)]
        assert world.puppet.streams == 2


async def test_a_restarted_rank_has_a_stream_of_its_own_at_once() -> None:
    async with running_world() as world:
        inbox = await world.start(A)
        await world.puppet.server.restart()
        assert [type(item) for item in await inbox.take()] == [WorkerLostError]
        assert world.streams.usable(world.puppet.server.info())
        again = await world.start(A, attempt=2)
        world.puppet.say(tokens(A, 3, attempt=2))
        assert await again.take() == [tokens(A, 3, attempt=2)]


async def test_closing_tells_every_request_and_blames_no_rank() -> None:
    async with running_world() as world:
        inbox = await world.start(A)
        await world.streams.close()
        assert [type(item) for item in await inbox.take()] == [WorkerLostError]
        assert world.lost == []
