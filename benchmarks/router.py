"""What the router costs: time to the first token, requests a second, processor time by prompt length, gaps of streams.

    python benchmarks/router.py [--part first|cpu|active|gaps|rank|peer …] [--requests N] [--active N] [--step-ms MS]

The router as a process of its own over two stub decode ranks that answer at once, asked over HTTP. What it adds is its
time to the first token less that of the same request to a stub rank over gRPC. Beside it `sglang-router`, which is Rust
and passes bodies on unread, over HTTP stubs that answer at once (`make bench-peers` fetches it). The bounds: 4 ms at
one request at a time, 15 ms of processor time at 100,000 ids. Client, stubs and router share the machine. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import uvloop
from router_cases.http_load import (
    Answered,
    Connection,
    closed_loop,
    closed_loop_apart,
    open_loop_apart,
    percentile,
    request_bytes,
)
from router_cases.processes import PORT, Started, sglang_router, whalepod_router
from router_cases.rank_side import step_costs

from whalepod.cluster.grpc_options import channel_options
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import mint_request_id
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc

T = TypeVar("T")

IDS = [300 + index % 1000 for index in range(1_000_000)]
SHORT: dict[str, Any] = {"model": "whale", "prompt": IDS[:64], "max_tokens": 1, "temperature": 0}
LENGTHS = {1_000: 60, 10_000: 40, 100_000: 12, 1_000_000: 3}
WHOLE: dict[str, Any] = {**SHORT, "prompt": "The whale swam on, and the sea was quiet about it. " * 4}
"""What the peer takes too: it knows no prompts of ids."""
TEXT = "The whale swam on, and the sea was quiet about it. "
PARTS = ("first", "cpu", "active", "gaps", "rank", "peer")
ACTIVE_S = 8.0
"""How long streams are active while others are measured."""
NEWCOMERS_PER_S = 200
AT_A_TIME = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each closed loop")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be given several times")
    parser.add_argument("--active", type=int, default=400, help="streams that are active while others are measured")
    parser.add_argument("--step-ms", type=float, default=50.0, help="between two tokens of an active stream")
    parser.add_argument("--processes", type=int, default=1, help="of the router, on one port")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask at 100 at a time, of either router")
    parser.add_argument("--stubs", type=int, default=2, help="stub ranks, and the peer's HTTP stubs")
    options = parser.parse_args()
    parts = options.part or PARTS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores for client, stubs and router together")
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="router-") as directory:
        if {"first", "cpu"} & set(parts):
            with whalepod_router(
                Path(directory), step_ms=0, processes=options.processes, ranks=options.stubs
            ) as router:
                if "first" in parts:
                    uvloop.run(first_tokens(router, figures, requests=options.requests, clients=options.clients))
                if "cpu" in parts:
                    uvloop.run(processor_time(router, figures))
        if {"active", "gaps"} & set(parts):
            step_ms, processes = options.step_ms, options.processes
            with whalepod_router(Path(directory), step_ms=step_ms, processes=processes, ranks=options.stubs) as router:
                load = ActiveLoad(router, streams=options.active, step_ms=options.step_ms)
                if "active" in parts:
                    uvloop.run(active_streams(load, figures))
                if "gaps" in parts:
                    uvloop.run(beside_long_prompts(load, figures))
    if "rank" in parts:
        uvloop.run(rank_side(figures))
    if "peer" in parts:
        with sglang_router(workers=options.stubs) as peer:
            figures["rps_c100_sglang_router"] = None
            if peer is None:
                print("sglang-router: not here; `make bench-peers` fetches it")
            else:
                uvloop.run(peer_rate(peer, figures, requests=options.requests, clients=options.clients))
    print(json.dumps({name: None if value is None else round(value, 3) for name, value in figures.items()}))


async def first_tokens(router: Started, figures: dict[str, float | None], *, requests: int, clients: int) -> None:
    """At 1, 20 and 100 requests at a time, streamed; and the rate of whole answers at 100."""
    streamed, whole = request_bytes({**SHORT, "stream": True}), request_bytes(WHOLE)
    await closed_loop(router.port, streamed, connections=20, requests=200)
    direct_s = await direct_first_token_s(router.stubs[0])
    print(f"a stub rank alone, over gRPC: p50 {1000 * direct_s:.2f} ms to the first token")
    for connections in (1, 20, 100):
        count = min(requests, 300 * connections)
        answers, seconds = await closed_loop(router.port, streamed, connections=connections, requests=count)
        p50, p99 = (1000 * (percentile([one.first_s for one in answers], p) - direct_s) for p in (50, 99))
        figures[f"added_ttft_ms_p50_c{connections}"], figures[f"added_ttft_ms_p99_c{connections}"] = p50, p99
        print(f"c = {connections}: adds p50 {p50:.2f} ms, p99 {p99:.2f} ms; {count / seconds:.0f} streams/s")
    rate, cpu_ms = await rate_at_100(router, whole, requests=requests, clients=clients)
    figures["rps_c100"] = rate
    print(f"c = 100, whole answers: {rate:.0f} requests/s, {cpu_ms:.2f} ms of processor time each")


async def rate_at_100(router: Started, request: bytes, *, requests: int, clients: int) -> tuple[float, float]:
    """Requests/s at 100 at a time, and milliseconds of processor time of each."""
    cpu_s = router.cpu_s()
    asked, seconds = await closed_loop_apart(
        router.port, request, connections=AT_A_TIME, requests=requests, processes=clients
    )
    return asked / seconds, 1000 * (router.cpu_s() - cpu_s) / (asked + AT_A_TIME)  # each connection's first, too


async def direct_first_token_s(port: int) -> float:
    """Of one request at a time to a stub rank."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        call = stub.Generate()
        times: list[float] = []
        for _ in range(300):
            sampling = common_pb2.SamplingParams(max_tokens=1)
            ticket = common_pb2.Ticket(request_id=mint_request_id(), attempt=1, sampling=sampling)
            signed = common_pb2.SignedTicket(ticket=ticket.SerializeToString())
            began_s = SYSTEM_CLOCK.monotonic_s()
            await call.write(decode_pb2.GenerateRequest(start=decode_pb2.Start(ticket=signed)))
            await call.read()
            times.append(SYSTEM_CLOCK.monotonic_s() - began_s)
        call.cancel()
    return percentile(times, 50)


async def processor_time(router: Started, figures: dict[str, float | None]) -> None:
    """Of one request, by the length of its prompt: as ids, and as text."""
    for length, count in LENGTHS.items():
        prompts: dict[str, object] = {"ids": IDS[:length]}
        if length <= 100_000:
            prompts["text"] = (TEXT * (length // 8))[: 4 * length]
        for kind, prompt in prompts.items():
            request = request_bytes({**SHORT, "prompt": prompt})
            await closed_loop(router.port, request, connections=1, requests=2)
            before_s = router.cpu_s()
            await closed_loop(router.port, request, connections=1, requests=count)
            cpu_ms = 1000 * (router.cpu_s() - before_s) / count
            if kind == "ids":
                figures[f"cpu_ms_{length // 1000}k"] = cpu_ms
            print(f"{length:>9,} tokens as {kind}: {cpu_ms:.2f} ms of processor time a request")


@dataclass(frozen=True, slots=True)
class ActiveLoad:
    """Streams that get a token every step."""

    router: Started
    streams: int
    step_ms: float

    async def beside(self, others: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, list[float], float]:
        """What `others` gives, while all streams are active; how late their tokens were, in ms; and how many tokens a
        second of router time they are, with what the others cost."""
        tokens = int(1000 * ACTIVE_S / self.step_ms)
        request = request_bytes({**SHORT, "max_tokens": tokens, "stream": True})
        opened = [await Connection.open(self.router.port) for _ in range(self.streams)]
        before_s = self.router.cpu_s()
        running = [asyncio.ensure_future(one.ask(request)) for one in opened]
        await asyncio.sleep(ACTIVE_S / 4)
        result = await others()
        answers: list[Answered] = await asyncio.gather(*running)
        rate = self.streams * tokens / max(1e-9, self.router.cpu_s() - before_s)
        for one in opened:
            one.close()
        return result, [1000 * gap - self.step_ms for one in answers for gap in one.gaps_s[1:]], rate


async def active_streams(load: ActiveLoad, figures: dict[str, float | None]) -> None:
    """How late tokens are while newcomers come at a steady rate; and the first tokens of these."""
    newcomer = request_bytes({**SHORT, "max_tokens": 1, "stream": True})
    new, late, rate = await load.beside(
        lambda: open_loop_apart(load.router.port, newcomer, per_s=NEWCOMERS_PER_S, seconds=ACTIVE_S / 2)
    )
    figures["gap_ms_p99"] = percentile(late, 99)
    figures["ttft_ms_p99_active"] = 1000 * percentile(new, 99) - load.step_ms
    figures["tokens_per_core_s"] = rate
    print(
        f"{load.streams} active streams in steps of {load.step_ms:g} ms and {NEWCOMERS_PER_S} newcomers a second: a "
        f"token is late by p99 {figures['gap_ms_p99']:.1f} ms, a newcomer's first token p99 "
        f"{figures['ttft_ms_p99_active']:.1f} ms after its step; {rate:.0f} tokens a second of router time"
    )


async def beside_long_prompts(load: ActiveLoad, figures: dict[str, float | None]) -> None:
    """How late tokens are while prompts of a million ids arrive, one after the other."""
    long = request_bytes({**SHORT, "prompt": IDS, "stream": True})
    (_, seconds), late, _ = await load.beside(lambda: closed_loop(load.router.port, long, connections=1, requests=4))
    figures["gap_ms_p99_beside_1m"] = percentile(late, 99)
    print(
        f"{load.streams} active streams beside four prompts of a million ids in {seconds:.1f} s: a token is late by "
        f"p99 {figures['gap_ms_p99_beside_1m']:.1f} ms, at most {max(late):.1f} ms"
    )


async def rank_side(figures: dict[str, float | None]) -> None:
    """What 256 streams cost the thread that steps a rank's engine, of steps of 50 ms."""
    alone, loaded = await step_costs(PORT + 60, streams=256)
    figures["rank_handover_ms"] = loaded.handover_ms
    figures["rank_step_ms_more"] = loaded.step_ms - alone.step_ms
    print(
        f"256 streams and the thread that steps a rank: {loaded.handover_ms:.2f} ms of its own for a hand-over; a step "
        f"of {alone.step_ms:.1f} ms takes {loaded.step_ms:.1f} ms beside their sending"
    )


async def peer_rate(peer: Started, figures: dict[str, float | None], *, requests: int, clients: int) -> None:
    rate, cpu_ms = await rate_at_100(peer, request_bytes(WHOLE), requests=requests, clients=clients)
    figures["rps_c100_sglang_router"] = rate
    print(f"sglang-router, c = 100: {rate:.0f} requests/s, {cpu_ms:.2f} ms of processor time each")


if __name__ == "__main__":
    main()
