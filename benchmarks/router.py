"""What the router costs: time to the first token, requests a second, processor time by prompt length, gaps of streams.

    python benchmarks/router.py [--part first|cpu|active|gaps|rank|choose|rate|peer …] [--requests N] [--active N]
        [--step-ms MS] [--processes N] [--clients N] [--stubs N]

The router as a process of its own over two stub decode ranks that answer at once, asked over HTTP. What it adds is its
time to the first token less that of the same request to a stub rank over gRPC. Beside it `sglang-router`, which is Rust
and passes bodies on unread, over HTTP stubs that answer at once (`make bench-peers` fetches it). The bounds: 4 ms at
one request at a time, 15 ms of processor time at 100,000 ids. Clients, stubs and router share the machine: on one with
many cores, client processes and stubs are given until neither router waits for them. The last line is one JSON object.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from router_cases.choosing import choosing_us
from router_cases.client_processes import clients, closed_loop, streams
from router_cases.http_load import Answered, Load, percentile, request_bytes
from router_cases.processes import PORT, Started, sglang_router, whalepod_router
from router_cases.rank_side import step_costs

from whalepod.cluster.grpc_options import channel_options
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import mint_request_id
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc

IDS = [300 + index % 1000 for index in range(1_000_000)]
SHORT: dict[str, Any] = {"model": "whale", "prompt": IDS[:64], "max_tokens": 1, "temperature": 0}
LENGTHS = {1_000: 60, 10_000: 40, 100_000: 12, 1_000_000: 3}
WHOLE: dict[str, Any] = {**SHORT, "prompt": "The whale swam on, and the sea was quiet about it. " * 4}
"""What the peer takes too: it knows no prompts of ids."""
TEXT = "The whale swam on, and the sea was quiet about it. "
PARTS = ("first", "cpu", "active", "gaps", "rank", "choose", "rate", "peer")
RANK_COUNTS = (2, 16, 64, 256)
ACTIVE_S = 8.0
"""How long streams are active while others are measured."""
NEWCOMERS_PER_S = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each closed loop")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be given several times")
    parser.add_argument("--active", type=int, default=400, help="streams that are active while others are measured")
    parser.add_argument("--step-ms", type=float, default=50.0, help="between two tokens of an active stream")
    parser.add_argument("--processes", type=int, default=1, help="of the router, on one port")
    parser.add_argument("--clients", type=int, default=1, help="processes that ask, of either router")
    parser.add_argument("--stubs", type=int, default=2, help="ranks under the router, and workers under the peer")
    options = parser.parse_args()
    parts = options.part or PARTS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores for client, stubs and router together")
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="router-") as directory:
        here, shape = Path(directory), {"processes": options.processes, "stubs": options.stubs}
        if {"first", "cpu", "rate"} & set(parts):
            with whalepod_router(here, step_ms=0, **shape) as router:
                if "first" in parts:
                    uvloop.run(first_tokens(router, figures, requests=options.requests))
                if {"first", "rate"} & set(parts):
                    uvloop.run(rate(router, figures, requests=options.requests, processes=options.clients))
                if "cpu" in parts:
                    uvloop.run(processor_time(router, figures))
        if {"active", "gaps"} & set(parts):
            with whalepod_router(here, step_ms=options.step_ms, **shape) as router:
                load = ActiveLoad(router, options.active, options.step_ms, options.clients)
                if "active" in parts:
                    uvloop.run(active_streams(load, figures))
                if "gaps" in parts:
                    uvloop.run(beside_long_prompts(load, figures))
    if "rank" in parts:
        uvloop.run(rank_side(figures))
    if "choose" in parts:
        for count in RANK_COUNTS:
            figures[f"choose_us_{count}"] = choosing_us(count)
            print(
                f"{count} decode and {count} prefill ranks: {figures[f'choose_us_{count}']:.0f} µs to choose and count"
            )
    if "peer" in parts:
        with sglang_router(stubs=options.stubs) as peer:
            figures["rps_c100_sglang_router"] = None
            if peer is None:
                print("sglang-router: not here; `make bench-peers` fetches it")
            else:
                uvloop.run(rate(peer, figures, requests=options.requests, processes=options.clients, peer=True))
    print(json.dumps({name: None if value is None else round(value, 3) for name, value in figures.items()}))


async def first_tokens(router: Started, figures: dict[str, float | None], *, requests: int) -> None:
    """At 1, 20 and 100 requests at a time, streamed."""
    streamed = request_bytes({**SHORT, "stream": True})
    await closed_loop(router.port, streamed, connections=20, requests=200)
    direct_s = await direct_first_token_s(router.stubs[0])
    print(f"a stub rank alone, over gRPC: p50 {1000 * direct_s:.2f} ms to the first token")
    for connections in (1, 20, 100):
        count = min(requests, 300 * connections)
        answers, seconds = await closed_loop(router.port, streamed, connections=connections, requests=count)
        p50, p99 = (1000 * (percentile([one.first_s for one in answers], p) - direct_s) for p in (50, 99))
        figures[f"added_ttft_ms_p50_c{connections}"], figures[f"added_ttft_ms_p99_c{connections}"] = p50, p99
        print(f"c = {connections}: adds p50 {p50:.2f} ms, p99 {p99:.2f} ms; {count / seconds:.0f} streams/s")


async def rate(
    router: Started, figures: dict[str, float | None], *, requests: int, processes: int, peer: bool = False
) -> None:
    """Of whole answers at 100 requests at a time."""
    whole, name = request_bytes(WHOLE), "sglang-router" if peer else "whalepod router"
    await closed_loop(router.port, whole, connections=20, requests=200)
    before_s = router.cpu_s()
    _, seconds = await closed_loop(router.port, whole, connections=100, requests=requests, processes=processes)
    figures["rps_c100_sglang_router" if peer else "rps_c100"] = requests / seconds
    cpu_ms = 1000 * (router.cpu_s() - before_s) / requests
    print(
        f"{name}, c = 100, whole answers: {requests / seconds:.0f} requests/s, {cpu_ms:.2f} ms of processor time each"
    )


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
    processes: int
    """Of clients that read them."""

    async def beside(self, request: bytes, load: Load) -> Beside:
        """Others, in a process of their own, while all streams are active."""
        tokens = int(1000 * ACTIVE_S / self.step_ms)
        stream = request_bytes({**SHORT, "max_tokens": tokens, "stream": True})
        loads = streams(self.router.port, connections=self.streams, processes=self.processes)
        async with clients(stream, loads) as active, clients(request, [load]) as others:
            before_s = self.router.cpu_s()
            running = asyncio.ensure_future(active.run())
            await asyncio.sleep(ACTIVE_S / 4)
            answers, seconds = await others.run()
            streamed, _ = await running
        tokens_per_s = self.streams * tokens / max(1e-9, self.router.cpu_s() - before_s)
        late_ms = [1000 * gap - self.step_ms for one in streamed for gap in one.gaps_s[1:]]
        return Beside(answers, seconds, late_ms, tokens_per_s)


@dataclass(frozen=True, slots=True)
class Beside:
    """What others met beside active streams. `late_ms`: tokens of the streams. `tokens_per_s`: of the streams, in a
    second of the router's processor time, with what the others cost in it."""

    answers: list[Answered]
    seconds: float
    late_ms: list[float]
    tokens_per_s: float


async def active_streams(load: ActiveLoad, figures: dict[str, float | None]) -> None:
    """How late tokens are while newcomers come at a steady rate; and the first tokens of these."""
    newcomer = request_bytes({**SHORT, "max_tokens": 1, "stream": True})
    count = int(NEWCOMERS_PER_S * ACTIVE_S / 2)
    seen = await load.beside(newcomer, Load("open", load.router.port, 20, count, per_s=NEWCOMERS_PER_S))
    first_ms = [1000 * one.first_s - load.step_ms for one in seen.answers]
    figures["gap_ms_p99"] = percentile(seen.late_ms, 99)
    figures["ttft_ms_p99_active"] = percentile(first_ms, 99)
    figures["tokens_per_core_s"] = seen.tokens_per_s
    print(
        f"{load.streams} active streams in steps of {load.step_ms:g} ms and {NEWCOMERS_PER_S} newcomers a second: a "
        f"token is late by p99 {figures['gap_ms_p99']:.1f} ms, a newcomer's first token p50 "
        f"{percentile(first_ms, 50):.1f}, p99 {figures['ttft_ms_p99_active']:.1f} ms after its step; "
        f"{seen.tokens_per_s:.0f} tokens a second of router time"
    )


async def beside_long_prompts(load: ActiveLoad, figures: dict[str, float | None]) -> None:
    """How late tokens are while prompts of a million ids arrive, one after the other."""
    long = request_bytes({**SHORT, "prompt": IDS, "stream": True})
    seen = await load.beside(long, Load("closed", load.router.port, 1, 4))
    figures["gap_ms_p99_beside_1m"] = percentile(seen.late_ms, 99)
    print(
        f"{load.streams} active streams beside four prompts of a million ids in {seen.seconds:.1f} s: a token is late "
        f"by p99 {figures['gap_ms_p99_beside_1m']:.1f} ms, at most {max(seen.late_ms):.1f} ms"
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


if __name__ == "__main__":
    main()
