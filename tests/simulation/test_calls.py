"""Calls over the simulated network behave as those of gRPC do: each of these runs over both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest

from tests.simulation.calls import UNREAD_MAX, Dialler
from tests.simulation.journal import Journal
from tests.simulation.network import SILENCE_S, Network, Node, Weather
from tests.simulation.virtual_time import SimulatedClock, StuckError, VirtualLoop, run_virtually
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc

ADDRESS = "server:1"
Open = Callable[[], Any]


class Echo(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Answers what it is told to, and notes what becomes of its calls."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.sent = 0

    async def Generate(
        self, request_iterator: AsyncIterator[decode_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        try:
            async for request in request_iterator:
                for number in range(request.ready.attempt):
                    self.sent += 1
                    yield decode_pb2.GenerateResponse(packed_step=b"%d" % number)
                if request.HasField("cancel"):
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("why", "so"),))
            self.ended.append("well")
        finally:
            self.ended.append("left")

    async def Run(self, request: prefill_pb2.RunRequest, context: Any) -> prefill_pb2.RunResponse:
        try:
            await asyncio.sleep(float(request.ticket.ticket or b"0"))
            return prefill_pb2.RunResponse(boundary_tokens=len(request.ticket.mac))
        finally:
            self.ended.append("left")


@asynccontextmanager
async def really(echo: Echo) -> AsyncGenerator[Open]:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(echo, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    await server.stop(0)


@asynccontextmanager
async def virtually(echo: Echo, network: Network) -> AsyncGenerator[Open]:
    server = Node(ADDRESS)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(echo, server)  # type: ignore[arg-type]
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(echo, server)  # type: ignore[arg-type]
    network.add(server)
    yield lambda: Dialler(network, Node("client:1")).channel(ADDRESS)


Scenario = Callable[[Echo, Open], Coroutine[Any, Any, None]]


@pytest.fixture(params=["grpc", "simulated"])
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        echo = Echo()

        async def over_grpc() -> None:
            async with really(echo) as channels:
                await scenario(echo, channels)

        async def over_nothing(loop: VirtualLoop) -> None:
            async with virtually(echo, network_of(loop)) as channels:
                await scenario(echo, channels)

        if request.param == "grpc":
            asyncio.run(over_grpc())
        else:
            run_virtually(CLOCK, over_nothing)

    return run


CLOCK = SimulatedClock()


def network_of(loop: VirtualLoop, weather: Weather | None = None) -> Network:
    return Network(loop, Random(1), weather or Weather(), Journal(CLOCK))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def burst(count: int) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(ready=decode_pb2.Ready(attempt=count))


def test_a_stream_brings_everything_in_order_and_ends(play: Callable[[Scenario], None]) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            await call.write(burst(3))
            await call.write(burst(2))
            await call.done_writing()
            assert [message.packed_step async for message in call] == [b"0", b"1", b"2", b"0", b"1"]
        await until(lambda: echo.ended == ["well", "left"])

    play(scenario)


def test_an_abort_brings_status_words_and_metadata(play: Callable[[Scenario], None]) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            await call.write(decode_pb2.GenerateRequest(cancel=decode_pb2.Cancel(attempt=1)))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                async for _ in call:
                    pass
        assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert ("why", "so") in tuple(failure.value.trailing_metadata())
        await until(lambda: echo.ended == ["left"])

    play(scenario)


def test_closing_a_channel_cancels_the_handlers_of_its_calls(play: Callable[[Scenario], None]) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            await call.write(burst(1))
            assert (await anext(aiter(call))).packed_step == b"0"
        await until(lambda: echo.ended[-1:] == ["left"])  # mostly after it has read the end of the requests

    play(scenario)


def test_who_is_cancelled_while_he_waits_for_an_answer_has_cancelled_the_call(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await stub.Run(run_for(b"60"))
            await until(lambda: echo.ended == ["left"])

    play(scenario)


def test_a_deadline_ends_both_sides(play: Callable[[Scenario], None]) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            assert (await stub.Run(run_for(b"0.01"), timeout=5)).boundary_tokens == 2
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Run(run_for(b"60"), timeout=0.3)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: echo.ended == ["left", "left"])

    play(scenario)


def test_who_writes_faster_than_the_other_side_reads_waits(play: Callable[[Scenario], None]) -> None:
    async def scenario(echo: Echo, channels: Open) -> None:
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            many = 1_000_000
            await call.write(burst(many))
            assert (await anext(aiter(call))).packed_step == b"0"
            await asyncio.sleep(0.3)
            assert echo.sent < many

    play(scenario)


def run_for(seconds: bytes) -> prefill_pb2.RunRequest:
    request = prefill_pb2.RunRequest()
    request.ticket.ticket, request.ticket.mac = seconds, b"12"
    return request


# What only a simulated network can be made to do.


def play_virtually(scenario: Callable[[Echo, Open, Network], Coroutine[Any, Any, None]]) -> None:
    async def main(loop: VirtualLoop) -> None:
        echo, network = Echo(), network_of(loop, Weather(late_rate=0.5))
        async with virtually(echo, network) as channels:
            await scenario(echo, channels, network)

    run_virtually(CLOCK, main)


def test_late_messages_of_a_stream_keep_their_order() -> None:
    async def scenario(echo: Echo, channels: Open, network: Network) -> None:
        del echo, network
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            await call.write(burst(UNREAD_MAX * 3))
            await call.done_writing()
            said = [int(message.packed_step) async for message in call]
        assert said == list(range(UNREAD_MAX * 3))

    play_virtually(scenario)


@pytest.mark.parametrize("heals", [True, False])
def test_what_waits_in_a_silence_goes_on_or_both_ends_give_up(heals: bool) -> None:
    async def scenario(echo: Echo, channels: Open, network: Network) -> None:
        async with channels() as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Generate()
            reader = aiter(call)
            await call.write(burst(1))
            assert (await anext(reader)).packed_step == b"0"
            network.silence("client:1", ADDRESS)
            await call.write(burst(1))
            waiting = asyncio.ensure_future(anext(reader))
            await asyncio.sleep(SILENCE_S - 1)
            assert not waiting.done()
            if heals:
                network.heal("client:1", ADDRESS)
                assert (await waiting).packed_step == b"0"
            else:
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await waiting
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
                await until(lambda: echo.ended[-1:] == ["left"])

    play_virtually(scenario)


def test_a_process_that_is_gone_refuses_calls_and_resets_those_it_had() -> None:
    async def scenario(echo: Echo, channels: Open, network: Network) -> None:
        async with channels() as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            server = network.find(ADDRESS)
            assert server is not None
            asyncio.get_running_loop().call_later(2, lambda: network.kill(server, with_host=False))
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await stub.Run(run_for(b"60"))
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert echo.ended == ["left"]

    play_virtually(scenario)


def test_a_run_that_waits_for_nothing_says_so() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(StuckError):
        run_virtually(SimulatedClock(), main)
