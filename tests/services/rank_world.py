"""Real ranks in this process, over the tiny golden model and a real Redis, and a router's side of the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

import grpc
import httpx
from pydantic import SecretStr

from tests.own_ports import with_own_ports
from whalepod.cluster.config import METRICS_PORT_OFFSET, ClusterConfig
from whalepod.cluster.dspark_settings import DsparkSettings
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.step_message import StepMessage, decode_step
from whalepod.cluster.tickets import pack_ids, sign_ticket
from whalepod.cluster.wire import FIDELITIES, sampling_to_proto
from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import StaleAttemptError
from whalepod.core.ids import RequestId, mint_request_id
from whalepod.engine.interface import Fidelity, FinishedEvent, SampledToken, TokensEvent
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from whalepod.services.decode.process import run_decode_rank
from whalepod.services.prefill.process import run_prefill_rank
from whalepod.services.vision.process import run_vision_rank

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"
"""W = 16, K = 28, B = 16, R0 = 2."""
BLOCK_TOKENS, KEPT_ROWS = 16, 28
SECRET = "a secret of a test cluster"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=9, ignore_eos=True, logprobs=0)

Key = tuple[RequestId, int]


def world_config(redis_port: int, **sections: dict[str, object]) -> ClusterConfig:
    """Settings of a small cluster on free ports. `sections`: fields of `prefill`, `decode`, …, to override."""
    config = ClusterConfig(model=str(CHECKPOINT), secret=SecretStr(SECRET), dspark=DsparkSettings(draft_tokens=5))
    sizes = config.model_dump()
    for pool in ("prefill", "decode", "vision"):  # each rank has a port
        sizes[pool]["replicas"] = sections.get(pool, {}).get("replicas", sizes[pool]["replicas"])
    values = with_own_ports(ClusterConfig.model_validate(sizes)).model_dump()
    for name, fields in sections.items():
        values[name] |= fields
    return ClusterConfig.model_validate({**values, "redis_port": redis_port})


@asynccontextmanager
async def running_rank(config: ClusterConfig, pool: str, *, index: int = 0) -> AsyncGenerator[RunningRank]:
    """Rank `index` of `pool`, until the block ends or `stop` is called."""
    run: Callable[..., Awaitable[None]] = {
        "prefill": run_prefill_rank,
        "decode": run_decode_rank,
        "vision": run_vision_rank,
    }[pool]
    ready: asyncio.Future[RankInfo] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(config, index, stop=stop, on_ready=ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        ready.cancel()
        await task
    try:
        yield RunningRank(config, ready.result(), stop, task)
    finally:
        stop.set()
        await task


@dataclass(frozen=True, slots=True)
class RunningRank:
    config: ClusterConfig
    info: RankInfo
    stop: asyncio.Event
    task: asyncio.Future[None]

    async def running(self) -> float:
        """Requests in its batch now, from its metrics."""
        return await gauge(self.config, self.info.pool, "whalepod_rank_running")


async def gauge(config: ClusterConfig, pool: str, name: str) -> float:
    """A value of rank 0 of `pool` now, from its metrics; 0 if it has not been counted yet."""
    port = {"prefill": config.prefill.port, "decode": config.decode.port}[pool] + METRICS_PORT_OFFSET
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{name} ")), 0.0)


@dataclass(slots=True)
class Heard:
    """What a decode rank said about one attempt."""

    tokens: list[SampledToken] = field(default_factory=list)
    end: FinishedEvent | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class TestRouter:
    """A router's side: signs tickets, calls prefill, talks to decode on one stream."""

    __test__ = False

    def __init__(self, rank: RankInfo, *, secret: str = SECRET) -> None:
        self._namespace = rank.namespace
        self._secret = ClusterSecret(secret.encode())
        self.model = rank.model

    def ticket(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        request_id: RequestId | None = None,
        attempt: int = 1,
        prefill: str = "",
        decode: str = "decode-0",
        salt: bytes = b"",
        fidelity: Fidelity = Fidelity.EXACT,
        timeout_s: float = 60.0,
        valid_s: float = 60.0,
        model: str | None = None,
        traceparent: str = "",
    ) -> common_pb2.SignedTicket:
        root = chain_root(self._namespace, salt=salt)
        now_ms = SYSTEM_CLOCK.unix_ms()
        ticket = common_pb2.Ticket(
            request_id=mint_request_id() if request_id is None else request_id,
            attempt=attempt,
            model=self.model if model is None else model,
            salt=salt,
            fidelity=FIDELITIES[fidelity],
            prompt_ids=pack_ids(prompt),
            block_hashes=b"".join(derive_block_hashes(prompt, root=root, block_tokens=BLOCK_TOKENS)),
            sampling=sampling_to_proto(sampling),
            deadline_unix_ms=now_ms + int(timeout_s * 1000),
            prefill_rank=prefill,
            decode_rank=decode,
            expires_unix_ms=now_ms + int(valid_s * 1000),
            signed_unix_ms=now_ms,
            traceparent=traceparent,
        )
        return sign_ticket(ticket, self._secret)


def key_of(signed: common_pb2.SignedTicket) -> Key:
    ticket = common_pb2.Ticket.FromString(signed.ticket)
    return RequestId(ticket.request_id), ticket.attempt


async def run_prefill(address: str, ticket: common_pb2.SignedTicket) -> prefill_pb2.RunResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        return await prefill_pb2_grpc.PrefillServiceStub(channel).Run(prefill_pb2.RunRequest(ticket=ticket))


class DecodeStream:
    """One stream to a decode rank, listened to from the start."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._outgoing: asyncio.Queue[decode_pb2.GenerateRequest | None] = asyncio.Queue()
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Generate(self._requests())
        self.messages: list[StepMessage] = []
        self.heard: dict[Key, Heard] = {}
        self._news = asyncio.Event()
        self.listening = asyncio.create_task(self._listen())

    def start(self, ticket: common_pb2.SignedTicket) -> Key:
        self.send_start(ticket)
        key = key_of(ticket)
        self.heard.setdefault(key, Heard())
        return key

    def send_start(self, ticket: common_pb2.SignedTicket) -> None:
        self._outgoing.put_nowait(decode_pb2.GenerateRequest(start=decode_pb2.Start(ticket=ticket)))

    def ready(self, key: Key, result: prefill_pb2.RunResponse | None) -> None:
        ready = decode_pb2.Ready(request_id=key[0], attempt=key[1], result=result)
        self._outgoing.put_nowait(decode_pb2.GenerateRequest(ready=ready))

    def cancel(self, key: Key) -> None:
        cancel = decode_pb2.Cancel(request_id=key[0], attempt=key[1])
        self._outgoing.put_nowait(decode_pb2.GenerateRequest(cancel=cancel))

    def close(self) -> None:
        """Nothing more to say; what was asked for is still wanted."""
        self._outgoing.put_nowait(None)

    def break_off(self) -> None:
        self._call.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await self._news.wait()
                self._news.clear()

    async def end_of(self, key: Key) -> Heard:
        await self.until(lambda: self.heard[key].end is not None)
        return self.heard[key]

    async def _requests(self) -> AsyncIterator[decode_pb2.GenerateRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _listen(self) -> None:
        async for response in self._call:
            message = decode_step(response.packed_step)
            self.messages.append(message)
            for event in message.events:
                heard = self.heard.setdefault((event.request_id, event.attempt), Heard())
                if isinstance(event, TokensEvent):
                    assert heard.end is None, "tokens after the end"
                    heard.tokens += event.tokens
                elif isinstance(event, FinishedEvent):
                    repeat = isinstance(event.error, StaleAttemptError)
                    assert heard.end is None or repeat, "two ends, and not of a start that was sent twice"
                    heard.end = heard.end or event
            self._news.set()


@asynccontextmanager
async def decode_stream(address: str) -> AsyncGenerator[DecodeStream]:
    async with grpc.aio.insecure_channel(address) as channel:
        stream = DecodeStream(channel)
        try:
            yield stream
        finally:
            stream.break_off()
            await asyncio.gather(stream.listening, return_exceptions=True)


def prompt_of(tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """The same first tokens for the same seed."""
    rng = Random(seed)
    return tuple(rng.randrange(3, 500) for _ in range(tokens))


@cache
def oracle() -> LLM:
    return LLM(CHECKPOINT)


@cache
def oracle_tokens(prompt: tuple[int, ...], max_tokens: int, *, seeded: bool = False) -> tuple[SampledToken, ...]:
    """What one process without a store draws for GREEDY or SEEDED."""
    sampling = replace(SEEDED if seeded else GREEDY, max_tokens=max_tokens)
    return oracle().generate([prompt], sampling)[0].output.tokens


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 10.0) -> None:
    """Ask again and again: for what a rank does on its own threads."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)
