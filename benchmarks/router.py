"""What the router costs: time to the first token, requests a second, processor time by prompt length, gaps of streams.

    python benchmarks/router.py [--requests N] [--active N]

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
from pathlib import Path
from typing import Any

import grpc
import uvloop
from router_cases.http_load import Answered, Connection, closed_loop, percentile, request_bytes
from router_cases.processes import Started, sglang_router, whalepod_router

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
STEP_MS = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each closed loop")
    parser.add_argument("--active", type=int, default=400, help="streams that are active while others are measured")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores for client, stubs and router together")
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="router-") as directory:
        with whalepod_router(Path(directory), step_ms=0) as router:
            uvloop.run(first_tokens(router, figures, requests=options.requests))
            uvloop.run(processor_time(router, figures))
        with whalepod_router(Path(directory), step_ms=STEP_MS) as router:
            uvloop.run(active_streams(router, figures, streams=options.active))
    with sglang_router() as peer:
        figures["rps_c100_sglang_router"] = None
        if peer is None:
            print("sglang-router: not here; `make bench-peers` fetches it")
        else:
            uvloop.run(peer_rate(peer, figures, requests=options.requests))
    print(json.dumps({name: None if value is None else round(value, 3) for name, value in figures.items()}))


async def first_tokens(router: Started, figures: dict[str, float | None], *, requests: int) -> None:
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
    cpu_s = router.cpu_s()
    _, seconds = await closed_loop(router.port, whole, connections=100, requests=requests)
    figures["rps_c100"] = requests / seconds
    cpu_ms = 1000 * (router.cpu_s() - cpu_s) / requests
    print(f"c = 100, whole answers: {requests / seconds:.0f} requests/s, {cpu_ms:.2f} ms of processor time each")


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


async def active_streams(router: Started, figures: dict[str, float | None], *, streams: int) -> None:
    """Streams that get a token every step: how late it is, alone and while prompts of a million tokens arrive; and the
    first token of newcomers meanwhile."""
    opened = await asyncio.gather(*(Connection.open(router.port) for _ in range(streams)))
    request = request_bytes({**SHORT, "max_tokens": 160, "stream": True})
    newcomer = request_bytes({**SHORT, "max_tokens": 1, "stream": True})
    before_s = router.cpu_s()
    running = [asyncio.ensure_future(one.ask(request)) for one in opened]
    await asyncio.sleep(1.0)
    new, _ = await closed_loop(router.port, newcomer, connections=4, requests=100)
    calm: list[Answered] = await asyncio.gather(*running)
    tokens_s = streams * 160 / max(1e-9, router.cpu_s() - before_s)
    running = [asyncio.ensure_future(one.ask(request)) for one in opened]
    long = request_bytes({**SHORT, "prompt": IDS, "stream": True})
    await closed_loop(router.port, long, connections=1, requests=4)
    disturbed: list[Answered] = await asyncio.gather(*running)
    for name, answers in (("gap_ms_p99", calm), ("gap_ms_p99_beside_1m", disturbed)):
        late = [1000 * gap - STEP_MS for one in answers for gap in one.gaps_s[1:]]
        figures[name] = percentile(late, 99)
    figures["ttft_ms_p99_active"] = 1000 * percentile([one.first_s for one in new], 99) - STEP_MS
    figures["tokens_per_core_s"] = tokens_s
    print(
        f"{streams} active streams: a token is late by p99 {figures['gap_ms_p99']:.1f} ms, beside prompts of a million "
        f"ids {figures['gap_ms_p99_beside_1m']:.1f} ms; {tokens_s:.0f} tokens a second of router time; a newcomer's "
        f"first token p99 {figures['ttft_ms_p99_active']:.1f} ms after its step"
    )
    for one in opened:
        one.close()


async def peer_rate(peer: Started, figures: dict[str, float | None], *, requests: int) -> None:
    whole = request_bytes(WHOLE)
    await closed_loop(peer.port, whole, connections=20, requests=200)
    before_s = peer.cpu_s()
    _, seconds = await closed_loop(peer.port, whole, connections=100, requests=requests)
    figures["rps_c100_sglang_router"] = requests / seconds
    cpu_ms = 1000 * (peer.cpu_s() - before_s) / requests
    print(f"sglang-router, c = 100: {requests / seconds:.0f} requests/s, {cpu_ms:.2f} ms of processor time each")


if __name__ == "__main__":
    main()
