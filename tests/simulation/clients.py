"""Simulated clients, what they were told, and what they should have been told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

import grpc

from tests.engine.engine_world import OPTIONS, World, tiny_model
from tests.engine.eviction_fuzz import of_hashes
from tests.simulation.calls import Dialler
from tests.simulation.network import Network, Node
from tests.simulation.plans import Ask
from tests.simulation.routers import router_address
from whalepod.cluster.wire import FIDELITIES, finish_reason_from_proto, sampling_to_proto
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc
from whalepod.services.router.tenancy import TENANT_HEADER

BLOCK_TOKENS = tiny_model().block_tokens
LATE_S = 0.5
"""What an answer may take past its deadline: it travels."""

TRUE_STATUSES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""What a cluster in trouble may say to a valid request. None of them blames the client, or says that we have a bug."""


@dataclass(slots=True)
class Answer:
    """What a client heard, and when."""

    ask: Ask
    began_s: float
    ids: list[int] = field(default_factory=list[int])
    end: router_pb2.GenerateStreamResponse | router_pb2.GenerateResponse | None = None
    status: grpc.StatusCode | None = None
    """None: it has not ended."""
    detail: str = ""
    ended_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status is grpc.StatusCode.OK


async def ask_router(ask: Ask, answer: Answer, network: Network) -> None:
    """Fill `answer`. The client gives up, or is too slow, as `ask` says."""
    node = Node(f"client-{ask.name}")
    channel = Dialler(network, node).channel(router_address(ask.router))
    stub = router_pb2_grpc.RouterServiceStub(channel)
    request = router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=ask.prompt),
        sampling=sampling_to_proto(ask.sampling),
        fidelity=FIDELITIES[ask.fidelity],
        cache_salt=ask.cache_salt,
    )
    kinds = {"timeout": ask.timeout_s, "metadata": ((TENANT_HEADER, ask.tenant),)}
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(ask.hangs_up_after_s):
                if ask.streams:
                    async for message in stub.GenerateStream(request, **kinds):
                        _note(answer, message)
                        await asyncio.sleep(ask.reads_every_s)
                else:
                    _note(answer, await stub.Generate(request, **kinds))
                answer.status = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as failure:
        answer.status, answer.detail = failure.code(), failure.details() or ""
    finally:
        answer.status = answer.status or grpc.StatusCode.CANCELLED
        answer.ended_s = network.loop.time()
        await channel.close()
        network.journal.note(ask.name, answer.status.name, answer.ids, answer.detail)


def _note(answer: Answer, message: router_pb2.GenerateStreamResponse | router_pb2.GenerateResponse) -> None:
    assert answer.end is None, f"{answer.ask.name}: something came after the end"
    answer.ids += message.token_ids
    if message.HasField("usage"):
        answer.end = message


def wrong_in(answer: Answer, others: Iterable[Answer], *, calm: bool) -> list[str]:
    """What a client can hold against us. `others`: all answers of the run. `calm`: nothing was meant to go wrong."""
    ask, wrong = answer.ask, list[str]()
    if answer.status is None:
        return ["it never ended"]
    if answer.ended_s > answer.began_s + ask.timeout_s + LATE_S and not ask.reads_every_s:
        wrong.append(f"it ended {answer.ended_s - answer.began_s:.3f} s after it was asked, of {ask.timeout_s:g} s")
    hung_up = answer.status is grpc.StatusCode.CANCELLED
    if hung_up and ask.hangs_up_after_s is None:
        wrong.append("it was cancelled, and not by its client")
    if answer.ok and answer.end is None:
        wrong.append(f"status {answer.status.name} without an end")
    if not answer.ok and answer.status not in TRUE_STATUSES:
        wrong.append(f"status {answer.status.name}: {answer.detail}")
    if calm and not answer.ok and not hung_up:
        wrong.append(f"status {answer.status.name} though nothing was wrong: {answer.detail}")
    known = _known_tokens(answer, others)
    alone = known < BLOCK_TOKENS and answer.end is not None and answer.end.route.attempts == 1
    wrong += _wrong_tokens(answer, cold=calm and alone)
    if answer.end is not None:
        wrong += _wrong_usage(answer, known=known)
    return wrong


def _wrong_tokens(answer: Answer, *, cold: bool) -> list[str]:
    """`cold`: it has met no state that others had left, and lost none of its own."""
    ask, ids = answer.ask, answer.ids
    if ask.fidelity is Fidelity.FAST and not cold:
        limit = ask.sampling.max_tokens or 0
        complete = not answer.ok or not ask.sampling.ignore_eos or len(ids) == limit
        return [] if complete and len(ids) <= limit else [f"{len(ids)} tokens of {limit}"]
    if not answer.ok and not ids:
        return []
    right, reason = oracle(ask.prompt, ask.sampling)
    expected = list(right) if answer.ok else list(right[: len(ids)])
    wrong = [] if ids == expected else [f"said {ids}, not {expected}"]
    if answer.end is not None and finish_reason_from_proto(answer.end.finish_reason) is not reason:
        wrong.append(f"finish reason {answer.end.finish_reason}, not {reason.value}")
    return wrong


def _wrong_usage(answer: Answer, *, known: int) -> list[str]:
    """`known`: tokens of its prompt that may be stored where it may look."""
    ask, end = answer.ask, answer.end
    assert end is not None
    usage, wrong = end.usage, list[str]()
    if usage.completion_tokens != len(answer.ids) or usage.prompt_tokens != len(ask.prompt):
        wrong.append(f"usage {usage} for {len(ask.prompt)} + {len(answer.ids)} tokens")
    if usage.cached_tokens > known:
        wrong.append(f"{usage.cached_tokens} cached tokens; those it may share with asked for {known} of its prompt")
    return wrong


def _known_tokens(answer: Answer, others: Iterable[Answer]) -> int:
    prompts = [other.ask.prompt for other in others if _may_hit(answer, other)]
    return max((_common(answer.ask.prompt, prompt) for prompt in prompts), default=0)


def _may_hit(answer: Answer, other: Answer) -> bool:
    """Whether it may have met state of the other's: of its own, only where an attempt, or its
    prefill, was lost."""
    if other is answer:
        return answer.end is not None and (answer.end.route.attempts > 1 or not answer.end.route.prefill_rank)
    domains = {(one.ask.tenant, one.ask.cache_salt) for one in (answer, other)}
    return len(domains) == 1 and other.began_s < answer.ended_s


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@cache
def _cold_rank() -> World:
    return World(options=replace(OPTIONS, slots=1, chunk_tokens=512), instrument=of_hashes)


@cache
def oracle(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], FinishReason]:
    """What one rank without a store says, alone and in one chunk, and why it ends."""
    heard = _cold_rank().generate(prompt, sampling, shares=False)
    return tuple(heard.ids), heard.end.reason
