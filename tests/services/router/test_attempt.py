"""The prefill leg of an attempt: what it cannot do the decode rank does, and the caller's fault stays the caller's."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.services.router import fake_ranks
from tests.services.router.fake_ranks import FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import (
    RouterUnderTest,
    answer_to,
    check_nothing_is_left,
    failure_of,
    running_router,
    until,
)
from whalepod.core.errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidFieldError,
    ServingError,
    StaleAttemptError,
    UnavailableError,
    WorkerLostError,
)
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2
from whalepod.services.router.tenancy import Principal

LONG = [400 + index % 90 for index in range(100)]
SHORT = LONG[:5]
RIGHT = expected_ids(LONG, 6)


class Listener:
    """A TCP port that is no gRPC server: it resets connections, or takes them and says nothing."""

    def __init__(self, *, reset: bool) -> None:
        self._reset = reset
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self._reset:
            writer.transport.abort()

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()


@pytest.mark.parametrize(
    "error",
    [InternalError("a bug"), UnavailableError("not now"), CapacityError("full"), WorkerLostError("gone"),
     AuthenticationError("clocks differ"), StaleAttemptError("seen a newer one")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_a2_what_the_prefill_rank_cannot_do_the_decode_rank_does(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, error: ServingError
) -> None:
    prefill.behaviour.refuse_with = error
    assert await answer_to(router, LONG) == RIGHT
    assert decode.seen.handoffs == [None], "told to compute the prompt, on the same attempt"
    await check_nothing_is_left(router, decode, prefill)


async def test_a_hand_off_that_cannot_be_read_is_none(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbled = prefill_pb2.RunResponse(first_token=common_pb2.Token(id=5, top_ids=b"abc"))
    monkeypatch.setattr(fake_ranks, "handoff_to_proto", lambda *_: garbled)
    assert await answer_to(router, LONG) == RIGHT
    assert decode.seen.handoffs == [None]
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidFieldError("prompt", "no such token"), 400, "invalid_value"),
        (ContextLengthError(tokens=9, tokens_max=8), 400, "context_length_exceeded"),
    ],
)
async def test_a2_the_callers_fault_stays_the_callers_and_ends_the_decode_leg(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, error: ServingError, status: int, code: str
) -> None:
    prefill.behaviour.refuse_with = error
    assert await failure_of(router, LONG) == (status, code)
    await check_nothing_is_left(router, decode, prefill)
    await until(lambda: len(decode.seen.starts) == 1)  # the answer of the other leg may have been quicker
    assert decode.seen.handoffs == []


async def test_a2_a_prefill_rank_that_resets_connections_costs_no_answer(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    await prefill.server.kill()
    async with Listener(reset=True) as port:
        prefill.server.port = port
        assert await answer_to(router, LONG) == RIGHT
    await check_nothing_is_left(router, decode)


async def test_a2_a_silent_prefill_rank_ends_with_the_deadline(
    model_dir: Path, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.hang = True
    ranks = [decode, prefill]
    limits: dict[str, Any] = {"request_timeout_seconds": 1.0, "queue_timeout_seconds": 1.0}
    async with running_router(model_dir, ranks, **limits) as router:
        assert await failure_of(router, LONG) == (504, "deadline_exceeded")
        await check_nothing_is_left(router, decode, prefill)


async def test_a_prefill_rank_killed_before_it_answers_is_replaced_by_another(
    model_dir: Path, decode: FakeDecode
) -> None:
    first, second = FakePrefill("prefill-0"), FakePrefill("prefill-1")
    async with running_router(model_dir, [decode, first, second]) as router:
        for rank in (first, second):
            rank.behaviour.step = asyncio.Event()
        asking = asyncio.create_task(answer_to(router, LONG))
        await until(lambda: first.running + second.running)
        victim, other = (first, second) if first.running else (second, first)
        await victim.server.kill()
        await until(lambda: other.running)
        assert other.behaviour.step is not None
        other.behaviour.step.set()
        assert await asking == RIGHT
        assert [work.attempt for work in decode.seen.starts] == [1, 2]
        assert [ticket.prefill_rank for ticket in decode.seen.tickets] == [victim.server.rank_id, other.server.rank_id]
        await check_nothing_is_left(router, decode, other)


async def test_the_only_prefill_rank_killed_before_it_answers_leaves_the_prompt_to_decode(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.step = asyncio.Event()
    asking = asyncio.create_task(answer_to(router, LONG))
    await until(lambda: prefill.running)
    await prefill.server.kill()
    assert await asking == RIGHT
    assert len(decode.seen.starts) == 1
    await check_nothing_is_left(router, decode)


async def test_a13_a_prefill_rank_that_comes_back_elsewhere_is_used_again(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    await answer_to(router, LONG)
    await prefill.server.kill()
    assert await answer_to(router, LONG) == RIGHT
    prefill.server.port = 0
    await prefill.server.restart()
    await until(lambda: "prefill-0" in router.directory.ranks)
    other = LONG[::-1]  # the first has been stored
    assert await answer_to(router, other) == expected_ids(other, 6)
    assert len(prefill.seen.starts) == 2


OPTIONS: list[dict[str, Any]] = [
    {"min_tokens": 5},
    {"min_tokens": 5, "max_tokens": 5},
    {"max_tokens": 1, "min_tokens": 1},
    {"stream_options": {"include_usage": True}},
    {"n": 3, "seed": 4},
    {"best_of": 1},
    {"logprobs": 5},
    {"logprobs": 0, "echo": False},
    {"stop": ["e", "in"]},
    {"stop_token_ids": [expected_ids(LONG, 3)[2]]},
    {"stop_token_ids": [expected_ids(LONG, 1)[0]], "min_tokens": 2},
    {"logit_bias": {"400": -100}},
    {"allowed_token_ids": [300, 301, 302], "bad_words": ["in"]},
    {"temperature": 1.0, "seed": 11, "top_k": 5, "top_p": 0.5},
    {"ignore_eos": True},
    {"echo": True},
    {"max_tokens": 1},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a16_options_mean_the_same_with_and_without_a_prefill_rank(model_dir: Path, stream: bool) -> None:
    answers: dict[str, list[Any]] = {}
    for mode in ("never", "always"):
        decode, prefill = FakeDecode(), FakePrefill()
        async with running_router(model_dir, [decode, prefill], remote_prefill=mode) as router:
            for options in OPTIONS:
                body: dict[str, Any] = {"prompt": LONG, "max_tokens": 8, "return_token_ids": True, **options}
                answer = await router.stream(**body) if stream else await router.complete(**body)
                answers.setdefault(mode, []).append(_without_names(answer))
            assert len(prefill.seen.starts) == (len(OPTIONS) + 2 if mode == "always" else 0)
    for options, local, remote in zip(OPTIONS, answers["never"], answers["always"], strict=True):
        assert local == remote, options


def _without_names(answer: Any) -> Any:
    if isinstance(answer, list):
        return sorted(
            (json.dumps(_without_names(json.loads(event))) for event in answer if event != "[DONE]"),
            key=lambda text: json.loads(text)["choices"][0]["index"] if json.loads(text)["choices"] else 99,
        )
    return {**answer, "id": "", "created": 0}


@pytest.mark.parametrize(
    "error", [InvalidFieldError("grammar", "no way on"), ContextLengthError(tokens=9, tokens_max=8)]
)
async def test_a5_a_decode_rank_that_refuses_for_good_releases_the_prefill_rank_at_once(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, error: ServingError
) -> None:
    prefill.behaviour.hang = True
    decode.behaviour.refuse_with = error
    for _ in range(5):
        assert (await failure_of(router, LONG))[0] == 400
        await until(lambda: prefill.running == 0, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


async def test_a_reader_that_is_slow_gets_nothing_after_the_deadline(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    """Though all of the answer has come and waits for it."""
    caller = router.front.caller(Principal("t"), timeout_s=0.5)
    sampling = SamplingParams(temperature=0, max_tokens=9)
    (job,) = await router.front.jobs(caller, SHORT, sampling, fidelity=Fidelity.FAST)
    async with aclosing(router.front.run(job, caller)) as progress:
        await anext(progress)
        await until(lambda: not decode.live)
        while not caller.deadline.expired:
            await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError):
            await anext(progress)
    await check_nothing_is_left(router, decode)
