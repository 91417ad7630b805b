"""Ranks for the router's tests: real gRPC servers whose engine is a formula, and which misbehave when told to.

The token at position p of a request is a function of its prompt, its seed and p alone, so every route and every attempt
must give the same answer: `expected_ids` says which.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.grpc_options import server_options
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.static_ranks import RankServicer
from whalepod.cluster.step_message import encode_step
from whalepod.cluster.tickets import engine_request_from_ticket, verify_ticket_or_raise
from whalepod.cluster.vision_orders import VisionCaller
from whalepod.cluster.wire import handoff_from_proto, handoff_to_proto
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ServingError
from whalepod.core.ids import RankId, RequestId, mint_incarnation
from whalepod.engine.interface import (
    EngineRequest,
    FinishedEvent,
    FinishReason,
    Handoff,
    PromptTokensEvent,
    RankLoad,
    SampledToken,
    SnapshotKind,
    StepEvent,
    TokensEvent,
    Work,
)
from whalepod.engine.noise import branch_key
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from whalepod.rpc.vision.v1 import vision_pb2, vision_pb2_grpc

NAMESPACE = b"fake ranks here!"
SECRET = ClusterSecret(b"the secret of the router's tests")
EOS_ID = 1
TOKENS_MAX_DEFAULT = 32
CONTEXT_TOKENS_MAX = 4096

NextToken = Callable[[Sequence[int], int | None, int], int]
"""(prompt, seed, position) to the id drawn there."""


def ordinary_token(prompt: Sequence[int], seed: int | None, position: int) -> int:
    """Any of 1,000 ids of ordinary text."""
    return 300 + zlib.crc32(repr((list(prompt), seed, position)).encode()) % 1000


def says(ids: Sequence[int]) -> NextToken:
    """A model that answers these ids, whatever it is asked, and then ends."""
    return lambda prompt, seed, position: ([*ids, EOS_ID])[min(position - len(prompt), len(ids))]


def sampled(token_id: int, position: int, logprobs: int | None) -> SampledToken:
    """With log-probabilities that tell token and position apart."""
    if logprobs is None:
        return SampledToken(token_id)
    top = tuple(range(token_id, token_id + logprobs))
    return SampledToken(token_id, -position / 64, top, tuple(-position / 64 - index for index in range(logprobs)))


@dataclass(slots=True)
class Behaviour:
    """How a rank behaves. The defaults are good manners."""

    next_token: NextToken = ordinary_token
    burst: int = 1
    """Tokens of one step."""
    cached_tokens: int = 0
    refuse_with: ServingError | None = None
    """Decode: the reply to a start. Prefill: the reply to a call."""
    hang: bool = False
    """Accept, then say nothing."""
    die_after_tokens: int | None = None
    """Decode: break the stream when so many tokens of a request have been sent."""
    deaths: int | None = None
    """Only so many requests break their stream; None: all."""
    gone_after_tokens: int | None = None
    """Decode: as `kill -9`, when so many tokens of a request have been sent."""
    fail_after_tokens: tuple[int, ServingError] | None = None
    repeat_finish: bool = False
    """Decode: say the end twice, and a token more."""
    stored: bool = True
    """Prefill: whether the store took the state."""
    step: asyncio.Event | None = None
    """Decode: no step, and no refusal, before it is set. Prefill: no reply before."""
    pause_s: float = 0.0
    """Between two steps."""


@dataclass(slots=True)
class Seen:
    """What a rank was asked to do."""

    starts: list[EngineRequest] = field(default_factory=list)
    tickets: list[common_pb2.Ticket] = field(default_factory=list)
    handoffs: list[Handoff | None] = field(default_factory=list)
    cancels: list[tuple[RequestId, int]] = field(default_factory=list)


class FakeServer:
    """A gRPC server that can be killed and started again on its port."""

    def __init__(self, rank_id: str, role: RankRole, register: Callable[[grpc.aio.Server], None]) -> None:
        self.rank_id = RankId(rank_id)
        self.role = role
        self._register = register
        self._server: grpc.aio.Server | None = None
        self._incarnation = mint_incarnation()
        self.port = 0
        self.context_tokens_max = CONTEXT_TOKENS_MAX
        self.slots_total = 8
        self.draining = False
        self.tls: PeerTls | None = None

    @property
    def alive(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        self._register(self._server)
        servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        describe = lambda: replace(self.info(), time_unix_ms=SYSTEM_CLOCK.unix_ms())  # noqa: E731
        RankServicer(describe, secret=SECRET).register(self._server)
        address = f"127.0.0.1:{self.port}"
        if self.tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.tls.server_credentials())
        await self._server.start()

    async def kill(self) -> None:
        """As `kill -9` looks from outside: calls break, the port is closed."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        await self.kill()
        self._incarnation = mint_incarnation()
        await self.start()

    def info(self) -> RankInfo:
        return RankInfo(
            rank_id=self.rank_id,
            role=self.role,
            pool=self.role.value,
            address=f"127.0.0.1:{self.port}",
            incarnation=self._incarnation,
            model="whale",
            namespace=NAMESPACE,
            layout="fake",
            context_tokens_max=self.context_tokens_max,
            draining=self.draining,
            reads_batches=True,
            speaks_tls=self.tls is not None,
            load=RankLoad(slots_total=self.slots_total, blocks_free=64, blocks_total=64),
        )


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, rank_id: str = "prefill-0", behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen = Seen()
        self.running = 0
        self.cancelled = 0
        self.server = FakeServer(rank_id, RankRole.PREFILL_FULL, self._register)

    def reset(self) -> None:
        """Good manners and no memories."""
        self.behaviour, self.seen, self.server.context_tokens_max = Behaviour(), Seen(), CONTEXT_TOKENS_MAX

    def _register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Run(
        self, request: prefill_pb2.RunRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> prefill_pb2.RunResponse:
        self.running += 1
        try:
            work = _open_ticket(request.ticket, self.server.rank_id, Work.PREFILL, self.seen)
            behaviour = replace(self.behaviour)
            if behaviour.step is not None:
                await behaviour.step.wait()
            if behaviour.hang:
                await asyncio.Event().wait()
            if behaviour.refuse_with is not None:
                status, message, metadata = status_of_error(behaviour.refuse_with)
                await context.abort(status, message, metadata)
            return handoff_to_proto(_handoff(work, behaviour), RankLoad(slots_total=4))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, rank_id: str = "decode-0", behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen = Seen()
        self.live: dict[tuple[RequestId, int], asyncio.Task[None]] = {}
        self.server = FakeServer(rank_id, RankRole.DECODE, self._register)

    def reset(self) -> None:
        """Good manners and no memories."""
        self.behaviour, self.seen, self.server.context_tokens_max = Behaviour(), Seen(), CONTEXT_TOKENS_MAX

    def _register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Generate(
        self,
        request_iterator: AsyncIterator[decode_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        out: asyncio.Queue[bytes | None] = asyncio.Queue()
        mine: dict[tuple[RequestId, int], asyncio.Queue[Handoff | None]] = {}
        reader = asyncio.create_task(self._read(request_iterator, out, mine))
        try:
            while (packed := await out.get()) is not None:
                yield decode_pb2.GenerateResponse(packed_step=packed)
            if self.behaviour.gone_after_tokens is not None:
                self._killing = asyncio.create_task(self.server.kill())
            await context.abort(grpc.StatusCode.UNAVAILABLE, "as told")
        finally:
            reader.cancel()
            for key in mine:
                self._drop(key)

    async def _read(
        self,
        requests: AsyncIterator[decode_pb2.GenerateRequest],
        out: asyncio.Queue[bytes | None],
        mine: dict[tuple[RequestId, int], asyncio.Queue[Handoff | None]],
    ) -> None:
        async for request in (one async for message in requests for one in (message, *message.more)):
            match request.WhichOneof("kind"):
                case "start":
                    work = _open_ticket(request.start.ticket, self.server.rank_id, Work.GENERATE, self.seen)
                    key = (work.request_id, work.attempt)
                    mine[key] = asyncio.Queue()
                    self.live[key] = asyncio.create_task(self._run(work, self._behaviour_now(), mine[key], out))
                case "ready":
                    ready = request.ready
                    handoff = handoff_from_proto(ready.result) if ready.HasField("result") else None
                    self.seen.handoffs.append(handoff)
                    mine[RequestId(ready.request_id), ready.attempt].put_nowait(handoff)
                case _:
                    key = (RequestId(request.cancel.request_id), request.cancel.attempt)
                    self.seen.cancels.append(key)
                    self._drop(key)

    def _behaviour_now(self) -> Behaviour:
        """Of a request that starts now: who waits for the start may ask for something else at once."""
        behaviour = replace(self.behaviour)
        if behaviour.deaths is not None:
            behaviour.die_after_tokens = behaviour.die_after_tokens if behaviour.deaths else None
            self.behaviour.deaths = max(0, behaviour.deaths - 1)
        return behaviour

    async def _run(
        self,
        work: EngineRequest,
        behaviour: Behaviour,
        ready: asyncio.Queue[Handoff | None],
        out: asyncio.Queue[bytes | None],
    ) -> None:
        try:
            if behaviour.refuse_with is not None:
                if behaviour.step is not None:
                    await behaviour.step.wait()
                _say(out, FinishedEvent(work.request_id, work.attempt, FinishReason.ERROR, behaviour.refuse_with))
                return
            handoff = await ready.get() if work.await_handoff else None
            if behaviour.hang:
                await asyncio.Event().wait()
            await _generate(work, behaviour, handoff, out)
        finally:
            self.live.pop((work.request_id, work.attempt), None)

    def _drop(self, key: tuple[RequestId, int]) -> None:
        task = self.live.pop(key, None)
        if task is not None:
            task.cancel()


async def _generate(
    work: EngineRequest, behaviour: Behaviour, handoff: Handoff | None, out: asyncio.Queue[bytes | None]
) -> None:
    tokens, reason, stop_id = rest_of(work, behaviour.next_token)
    restored = handoff is not None and handoff.stored and handoff.boundary_tokens > 0
    # Its own view of a hand-off: everything was restored. The router must not take that for a hit.
    cached = len(work.prompt_ids) if restored else behaviour.cached_tokens
    if work.sampling.prompt_logprobs is not None and not work.resumed_ids:
        for start in range(1, len(work.prompt_ids), 2):  # two a step
            scored = [_scored(work, position) for position in range(start, min(start + 2, len(work.prompt_ids)))]
            _say(out, PromptTokensEvent(work.request_id, work.attempt, start, tuple(scored)))
    for start in range(0, len(tokens), behaviour.burst):
        if behaviour.step is not None:
            await behaviour.step.wait()
        await asyncio.sleep(behaviour.pause_s)
        if behaviour.fail_after_tokens is not None and start >= behaviour.fail_after_tokens[0]:
            error = behaviour.fail_after_tokens[1]
            _say(out, FinishedEvent(work.request_id, work.attempt, FinishReason.ERROR, error))
            return
        mortal = (behaviour.die_after_tokens, behaviour.gone_after_tokens)
        if any(tokens_max is not None and start >= tokens_max for tokens_max in mortal):
            out.put_nowait(None)
            return
        burst = tuple(tokens[start : start + behaviour.burst])
        _say(out, TokensEvent(work.request_id, work.attempt, burst, cached))
    end = FinishedEvent(work.request_id, work.attempt, reason, matched_stop_id=stop_id, cached_tokens=cached)
    _say(out, end)
    if behaviour.repeat_finish:
        _say(out, end, TokensEvent(work.request_id, work.attempt, (SampledToken(999),)))


def answer_of(work: EngineRequest, next_token: NextToken) -> tuple[list[SampledToken], FinishReason, int | None]:
    """The whole answer to a request, as any rank gives it."""
    sampling = work.sampling
    seed = branch_key((sampling.seed or 0) % 2**64, work.branch) if work.branch else sampling.seed
    tokens: list[SampledToken] = []
    for position in range(len(work.prompt_ids), len(work.prompt_ids) + (sampling.max_tokens or TOKENS_MAX_DEFAULT)):
        token_id = next_token(work.prompt_ids, seed, position)
        ends = token_id in sampling.stop_token_ids or (token_id == EOS_ID and not sampling.ignore_eos)
        if ends and len(tokens) < sampling.min_tokens:
            token_id, ends = 300, False
        tokens.append(sampled(token_id, position, sampling.logprobs))
        if ends:
            return tokens, FinishReason.STOP, token_id if token_id in sampling.stop_token_ids else None
    return tokens, FinishReason.LENGTH, None


def rest_of(work: EngineRequest, next_token: NextToken) -> tuple[list[SampledToken], FinishReason, int | None]:
    """What follows the output that other ranks have drawn, which must be the right one."""
    tokens, reason, stop_id = answer_of(work, next_token)
    resumed = len(work.resumed_ids)
    assert [token.id for token in tokens[:resumed]] == list(work.resumed_ids)
    return tokens[resumed:], reason, stop_id


def _scored(work: EngineRequest, position: int) -> SampledToken:
    """One of the prompt's tokens, as the rank scores it: position says which."""
    count = work.sampling.prompt_logprobs or 0
    own = work.prompt_ids[position]
    best = tuple(range(300, 300 + count))
    return SampledToken(own, -float(position), best, tuple(-position / 2 - index for index in range(count)))


def expected_ids(prompt: Sequence[int], count: int, *, seed: int | None = None) -> list[int]:
    return [ordinary_token(prompt, seed, len(prompt) + index) for index in range(count)]


def _handoff(work: EngineRequest, behaviour: Behaviour) -> Handoff:
    tokens, reason, stop_id = rest_of(work, behaviour.next_token)
    ended = len(tokens) == 1
    return Handoff(
        boundary_tokens=len(work.prompt_ids) if behaviour.stored and not ended else 0,
        kind=SnapshotKind.FULL if behaviour.stored and not ended else None,
        first_token=tokens[0],
        finish_reason=reason if ended else None,
        matched_stop_id=stop_id if ended else None,
        cached_tokens=behaviour.cached_tokens,
        stored=behaviour.stored,
    )


def _open_ticket(signed: common_pb2.SignedTicket, rank_id: RankId, work: Work, seen: Seen) -> EngineRequest:
    ticket = verify_ticket_or_raise(signed, SECRET, rank_id=rank_id)
    awaits = work is Work.GENERATE and bool(ticket.prefill_rank)
    request = engine_request_from_ticket(ticket, namespace=NAMESPACE, work=work, await_handoff=awaits)
    seen.tickets.append(ticket)
    seen.starts.append(request)
    return request


def _say(out: asyncio.Queue[bytes | None], *events: StepEvent) -> None:
    out.put_nowait(encode_step(events, RankLoad(slots_total=8)))


class FakeVision(vision_pb2_grpc.VisionServiceServicer):
    """A vision rank that is told of images and answers nothing of use."""

    def __init__(self, rank_id: str = "vision-0") -> None:
        self.orders: list[vision_pb2.EncodeOrder] = []
        self.cancelled = 0
        self.hang = False
        self.server = FakeServer(rank_id, RankRole.VISION, self._register)

    def _register(self, server: grpc.aio.Server) -> None:
        vision_pb2_grpc.add_VisionServiceServicer_to_server(self, server)

    async def Encode(
        self, request: vision_pb2.EncodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> vision_pb2.EncodeResponse:
        del context
        self.orders.append(VisionCaller("whale", NAMESPACE, SECRET, SYSTEM_CLOCK).verified(request))
        try:
            if self.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return vision_pb2.EncodeResponse(tokens=3, encoded=True)
