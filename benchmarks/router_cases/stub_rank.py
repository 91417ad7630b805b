"""A decode rank that answers at once: the real protocol, and no engine. A process of its own.

    python -m router_cases.stub_rank --index I --port P --redis-url URL --secret SECRET [--step-ms MS]

With a step time, all live requests get one token in each step, in one message to each router; without, requests get all
of their tokens in one message, together with those that came in the same message.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

import grpc
import uvloop

from whalepod.cluster.grpc_options import server_options
from whalepod.cluster.registrar import Registrar
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.step_message import encode_step
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import RankId, RequestId, mint_incarnation
from whalepod.engine.interface import FinishedEvent, FinishReason, RankLoad, SampledToken, StepEvent, TokensEvent
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc

CONTEXT_TOKENS_MAX = 1 << 21
SLOTS = 4096
TOKEN = SampledToken(300)

Key = tuple[RequestId, int]


class StubDecode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, *, step_s: float) -> None:
        self._step_s = step_s

    async def Generate(  # noqa: N802  the RPC's name
        self,
        request_iterator: AsyncIterator[decode_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateResponse],
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        del context
        out: asyncio.Queue[bytes] = asyncio.Queue()
        live: dict[Key, int] = {}
        tasks = [asyncio.create_task(self._read(request_iterator, live, out))]
        if self._step_s:
            tasks.append(asyncio.create_task(self._step_forever(live, out)))
        try:
            while True:
                yield decode_pb2.GenerateResponse(packed_step=await out.get())
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self, requests: AsyncIterator[decode_pb2.GenerateRequest], live: dict[Key, int], out: asyncio.Queue[bytes]
    ) -> None:
        async for message in requests:
            events: list[StepEvent] = []
            for request in (message, *message.more):
                if request.WhichOneof("kind") == "cancel":
                    live.pop((RequestId(request.cancel.request_id), request.cancel.attempt), None)
                elif request.WhichOneof("kind") == "start":
                    ticket = common_pb2.Ticket.FromString(request.start.ticket.ticket)
                    key = (RequestId(ticket.request_id), ticket.attempt)
                    live[key] = ticket.sampling.max_tokens
                    if not self._step_s:
                        events += [TokensEvent(*key, (TOKEN,) * live.pop(key), 0), _end(key)]
            if events:
                out.put_nowait(encode_step(events, _load(live)))

    async def _step_forever(self, live: dict[Key, int], out: asyncio.Queue[bytes]) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            events: list[StepEvent] = []
            for key in list(live):
                events.append(TokensEvent(*key, (TOKEN,), 0))
                live[key] -= 1
                if not live[key]:
                    del live[key]
                    events.append(_end(key))
            if events:
                out.put_nowait(encode_step(events, _load(live)))


def _end(key: Key) -> FinishedEvent:
    return FinishedEvent(*key, FinishReason.LENGTH)


def _load(live: dict[Key, int]) -> RankLoad:
    return RankLoad(running=len(live), slots_total=SLOTS, blocks_free=1, blocks_total=1)


async def serve(options: argparse.Namespace) -> None:
    server = grpc.aio.server(options=server_options())
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(StubDecode(step_s=options.step_ms / 1000), server)
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    me = RankInfo(
        rank_id=RankId(f"decode-{options.index}"),
        role=RankRole.DECODE,
        pool="decode",
        address=f"127.0.0.1:{options.port}",
        incarnation=mint_incarnation(),
        model="whale",
        namespace=b"stub ranks here!",
        layout="stub",
        reads_batches=True,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        load=_load({}),
    )
    registrar = Registrar(
        redis_url=options.redis_url, secret=ClusterSecret(options.secret.encode()), describe=lambda: me
    )
    await registrar.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
