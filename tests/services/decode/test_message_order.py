"""Whatever a router's messages come in as, repeated, late or of nothing known: a rank ends what it began, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tests.services.decode.test_servicer import decode_rank, idle
from tests.services.rank_world import GREEDY, Key, TestRouter, decode_stream, key_of, prompt_of, until
from whalepod.core.errors import InternalError, StaleAttemptError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import FinishReason
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2

REQUESTS = 12


def _lie(prompt_tokens: int) -> prefill_pb2.RunResponse:
    """Of a prefill rank whose snapshot is in no store."""
    return prefill_pb2.RunResponse(
        boundary_tokens=prompt_tokens, snapshot_kind=prefill_pb2.SNAPSHOT_KIND_FULL, stored=True
    )


def _script(
    rng: Random, router: TestRouter
) -> tuple[list[tuple[str, Key, common_pb2.SignedTicket]], dict[Key, common_pb2.SignedTicket]]:
    """What to send, in order, and the tickets of those that nobody cancels."""
    messages, kept = list[tuple[str, Key, common_pb2.SignedTicket]](), dict[Key, common_pb2.SignedTicket]()
    for seed in range(REQUESTS):
        prompt = prompt_of(rng.randrange(1, 60), seed=seed)
        sampling = replace(GREEDY, max_tokens=rng.randrange(1, 9))
        ticket = router.ticket(prompt, sampling, prefill=rng.choice(["", "prefill-0"]))
        key = key_of(ticket)
        own = ["start", *rng.choices(["start", "ready", "lie"], k=rng.randrange(4))]
        if rng.random() < 0.4:
            own += ["cancel"] * rng.randrange(1, 3)
        else:
            kept[key] = ticket
        rng.shuffle(own)
        messages += [(kind, key, ticket) for kind in own]
    rng.shuffle(messages)
    messages += [(kind, key, ticket) for key, ticket in kept.items() for kind in ("start", "ready")]
    return messages, kept


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
async def test_a6_messages_in_any_order_and_number_end_every_request_once_and_leave_nothing(
    redis_port: int, seed: int
) -> None:
    rng = Random(seed)
    async with decode_rank(redis_port) as (rank, router, stream):
        messages, kept = _script(rng, router)
        for kind, key, ticket in messages:
            match kind:
                case "start":
                    stream.start(ticket)
                case "ready":
                    stream.ready(key, None)
                case "lie":
                    stream.ready(key, _lie(len(common_pb2.Ticket.FromString(ticket.ticket).prompt_ids) // 4))
                case _:
                    stream.cancel(key)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.02)
        stream.cancel((RequestId(b"an unknown one.."), 1))
        for key in kept:
            heard = await stream.end_of(key)
            assert heard.end is not None
            assert heard.end.reason is FinishReason.LENGTH, heard.end
        others = {key for _, key, _ in messages} - kept.keys()
        for key in others:  # a start behind a cancel runs, and is told: its router drops what it says
            stream.cancel(key)
        await until(lambda: idle(rank))
        assert not stream.listening.done(), "the stream broke"


async def test_a_used_ticket_is_refused_on_another_stream_after_its_end(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        ticket = router.ticket(prompt_of(20), replace(GREEDY, max_tokens=2))
        await stream.end_of(stream.start(ticket))
        async with decode_stream(rank.info.address) as other:
            end = (await other.end_of(other.start(ticket))).end
        assert end is not None
        assert isinstance(end.error, StaleAttemptError)
        await until(lambda: idle(rank))


async def test_a_hand_off_that_cannot_be_read_ends_its_own_request_alone(redis_port: int) -> None:
    async with decode_rank(redis_port) as (rank, router, stream):
        other = stream.start(router.ticket(prompt_of(20, seed=1), replace(GREEDY, max_tokens=24)))
        key = stream.start(router.ticket(prompt_of(20), prefill="prefill-0"))
        stream.ready(key, prefill_pb2.RunResponse(first_token=common_pb2.Token(id=5, top_ids=b"abc")))
        end = (await stream.end_of(key)).end
        assert end is not None
        assert isinstance(end.error, InternalError)
        assert len((await stream.end_of(other)).tokens) == 24
        await until(lambda: idle(rank))
