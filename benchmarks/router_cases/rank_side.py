"""What streams cost the thread that steps the engine: handing a step over, and sharing an interpreter with its sending.

the thread: a step's arithmetic (Python), hand over ─▶ event loop: encode, send ─▶ a reader, in a process of its own

python -m router_cases.rank_side --port P --streams N      (the reader)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import grpc
import uvloop

from whalepod.cluster.grpc_options import channel_options, server_options
from whalepod.cluster.rank_metrics import count_events
from whalepod.cluster.rank_process import RankContext, RankIdentity
from whalepod.cluster.registration import RankRole
from whalepod.cluster.tickets import pack_ids, sign_ticket
from whalepod.core.clock import SYSTEM_CLOCK, thread_cpu_s
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import RankId, RequestId, mint_incarnation, mint_request_id
from whalepod.engine.interface import EngineRequest, Fidelity, RankLoad, SampledToken, TokensEvent
from whalepod.engine.rank import EngineRank
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.services.decode.servicer import DecodeServicer

SECRET = ClusterSecret(b"the secret of this benchmark")
NAMESPACE = b"stub ranks here!"
STEPS = 60
WORK = 400_000
"""Additions of one step: some tens of milliseconds of a thread that never gives the interpreter back by itself."""


@dataclass(slots=True)
class Keys:
    """Stands for the engine: knows which requests there are."""

    live: list[tuple[RequestId, int]] = field(default_factory=list)

    def submit(self, request: EngineRequest) -> None:
        self.live.append((request.request_id, request.attempt))

    def cancel(self, request_id: RequestId, attempt: int, *, goes_on: bool = False) -> None:
        del goes_on
        self.live.remove((request_id, attempt))

    def load(self) -> RankLoad:
        return RankLoad(running=len(self.live))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over the steps, in ms: of the thread's own time for a hand-over, and of a step of it."""

    handover_ms: float
    step_ms: float


async def step_costs(port: int, *, streams: int) -> tuple[StepCost, StepCost]:
    """Without any stream, and with so many."""
    engine = Keys()
    service = DecodeServicer(_context(engine))
    server = grpc.aio.server(options=server_options())
    service.register(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    alone = await _stepped(engine, service)
    command = [sys.executable, "-m", "router_cases.rank_side", "--port", str(port), "--streams", str(streams)]
    reader = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parent.parent)
    try:
        async with asyncio.timeout(30):
            while len(engine.live) < streams:
                await asyncio.sleep(0.05)
        return alone, await _stepped(engine, service)
    finally:
        reader.terminate()
        await reader.wait()
        await server.stop(None)


async def _stepped(engine: Keys, service: DecodeServicer) -> StepCost:
    loop = asyncio.get_running_loop()
    handovers_s: list[float] = []
    steps_s: list[float] = []

    def step_forever() -> None:
        for _ in range(STEPS):
            began_s = SYSTEM_CLOCK.monotonic_s()
            _additions(WORK)
            events = [TokensEvent(*key, (SampledToken(300),), 0) for key in engine.live]
            before_s = thread_cpu_s()
            if events:
                count_events(events)
                loop.call_soon_threadsafe(service.deliver, events, engine.load())
            handovers_s.append(thread_cpu_s() - before_s)
            steps_s.append(SYSTEM_CLOCK.monotonic_s() - began_s)

    thread = threading.Thread(target=step_forever)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.05)
    return StepCost(1000 * median(handovers_s), 1000 * median(steps_s))


def _additions(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _context(engine: Keys) -> RankContext:
    identity = RankIdentity(
        rank_id=RankId("decode-0"),
        index=0,
        role=RankRole.DECODE,
        pool="decode",
        host="127.0.0.1",
        port=0,
        address="",
        incarnation=mint_incarnation(),
        model_name="whale",
    )
    return RankContext(
        identity=identity,
        engine=cast(EngineRank, engine),
        secret=SECRET,
        namespace=NAMESPACE,
        fidelities=(Fidelity.FAST,),
        clock=SYSTEM_CLOCK,
    )


async def read(port: int, *, streams: int) -> None:
    """One router's stream with so many requests on it."""

    async def starts() -> AsyncIterator[decode_pb2.GenerateRequest]:
        now_ms = SYSTEM_CLOCK.unix_ms()
        for _ in range(streams):
            ticket = common_pb2.Ticket(
                request_id=mint_request_id(),
                attempt=1,
                model="whale",
                prompt_ids=pack_ids([300]),
                sampling=common_pb2.SamplingParams(max_tokens=1000),
                decode_rank="decode-0",
                deadline_unix_ms=now_ms + 60_000,
                expires_unix_ms=now_ms + 60_000,
                signed_unix_ms=now_ms,
            )
            yield decode_pb2.GenerateRequest(start=decode_pb2.Start(ticket=sign_ticket(ticket, SECRET)))
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        async for _ in stub.Generate(starts()):
            pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    asked = parser.parse_args()
    uvloop.run(read(asked.port, streams=asked.streams))
