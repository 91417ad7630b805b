"""Ranks that refuse, hang, die and repeat themselves: a right answer or the truth, in time, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import FakeRank, RouterUnderTest, running_router, until
from whalepod.core.errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    InternalError,
    InvalidFieldError,
    ServingError,
    StaleAttemptError,
    UnavailableError,
    WorkerLostError,
)

LONG = [400 + index % 90 for index in range(100)]
SHORT = LONG[:5]
RIGHT = expected_ids(LONG, 6)


async def answer_to(router: RouterUnderTest, prompt: Sequence[int] = LONG, **body: Any) -> list[int]:
    answer = await router.complete(prompt=list(prompt), max_tokens=6, return_token_ids=True, **body)
    return answer["choices"][0]["token_ids"]


async def failure_of(router: RouterUnderTest, prompt: Sequence[int] = LONG, **body: Any) -> tuple[int, str]:
    response = await router.http.post("/v1/completions", json={"prompt": list(prompt), "max_tokens": 6, **body})
    return response.status_code, response.json()["error"]["code"]


async def check_nothing_is_left(router: RouterUnderTest, *ranks: FakeRank) -> None:
    """Within a second no rank works for anybody and the router holds nothing."""
    for rank in ranks:
        idle = (lambda r=rank: not r.live) if isinstance(rank, FakeDecode) else (lambda r=rank: r.running == 0)
        await until(idle, timeout_s=1.0)
    assert router.front.admission.running == 0
    for info in router.directory.ranks.values():
        candidate = router.front.table.candidate(info)
        assert (candidate.requests_here, candidate.prefill_tokens_here) == (0, 0)


@asynccontextmanager
async def stream_of(router: RouterUnderTest, **body: Any) -> AsyncGenerator[AsyncGenerator[str, None], None]:
    async with router.http.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()

        async def events() -> AsyncGenerator[str, None]:
            async for line in response.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")

        yield events()


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


# --------------------------------------------------------------------------------------------------- the prefill leg


@pytest.mark.parametrize(
    "error",
    [InternalError("a bug"), UnavailableError("draining"), CapacityError("full"), WorkerLostError("gone"),
     AuthenticationError("clocks differ"), StaleAttemptError("seen a newer one")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_a2_what_the_prefill_rank_cannot_do_the_decode_rank_does(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, error: ServingError
) -> None:
    prefill.behaviour.refuse_with = error
    assert await answer_to(router) == RIGHT
    assert decode.seen.handoffs == [None], "told to compute the prompt, on the same attempt"
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
    assert await failure_of(router) == (status, code)
    await check_nothing_is_left(router, decode, prefill)
    assert len(decode.seen.starts) == 1
    assert decode.seen.handoffs == []


async def test_a2_a_prefill_rank_that_resets_connections_costs_no_answer(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    await prefill.server.kill()
    async with Listener(reset=True) as port:
        prefill.server.port = port
        assert await answer_to(router) == RIGHT
    await check_nothing_is_left(router, decode)


async def test_a2_a_silent_prefill_rank_ends_with_the_deadline(
    model_dir: Path, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.hang = True
    ranks = [decode, prefill]
    limits = {"request_timeout_seconds": 1.0, "queue_timeout_seconds": 1.0}
    async with running_router(model_dir, ranks, **limits) as router:
        assert await failure_of(router) == (504, "deadline_exceeded")
        await check_nothing_is_left(router, decode, prefill)


async def test_a_prefill_rank_killed_before_it_answers_is_replaced_by_another(
    model_dir: Path, decode: FakeDecode
) -> None:
    first, second = FakePrefill("prefill-0"), FakePrefill("prefill-1")
    async with running_router(model_dir, [decode, first, second]) as router:
        for rank in (first, second):
            rank.behaviour.step = asyncio.Event()
        asking = asyncio.create_task(answer_to(router))
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
    asking = asyncio.create_task(answer_to(router))
    await until(lambda: prefill.running)
    await prefill.server.kill()
    assert await asking == RIGHT
    assert len(decode.seen.starts) == 1
    await check_nothing_is_left(router, decode)


async def test_a13_a_prefill_rank_that_comes_back_elsewhere_is_used_again(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    await answer_to(router)
    await prefill.server.kill()
    assert await answer_to(router) == RIGHT
    prefill.server.port = 0
    await prefill.server.restart()
    await until(lambda: "prefill-0" in router.directory.ranks)
    assert await answer_to(router) == RIGHT
    assert len(prefill.seen.starts) == 2


# ---------------------------------------------------------------------------------------------------- the decode leg


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
@pytest.mark.parametrize("error", [CapacityError("full"), UnavailableError("draining"), WorkerLostError("stopped")])
async def test_a_decode_rank_that_refuses_is_replaced_by_another(
    model_dir: Path, prefill: FakePrefill, prompt: list[int], error: ServingError
) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    async with running_router(model_dir, [*ranks, prefill]) as router:
        ranks[0].behaviour.refuse_with = error
        for _ in range(6):
            assert await answer_to(router, prompt) == expected_ids(prompt, 6)
        assert len(ranks[1].seen.starts) == 6
        await check_nothing_is_left(router, *ranks, prefill)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_a_decode_rank_that_dies_before_its_first_token_is_replaced_by_another(
    model_dir: Path, prefill: FakePrefill, prompt: list[int]
) -> None:
    mortal, other = FakeDecode("decode-0", Behaviour(die_after_tokens=0)), FakeDecode("decode-1")
    async with running_router(model_dir, [mortal, other, prefill]) as router:
        while not mortal.seen.starts:
            assert await answer_to(router, prompt) == expected_ids(prompt, 6)
        assert other.seen.starts[-1].request_id == mortal.seen.starts[-1].request_id
        assert (mortal.seen.starts[-1].attempt, other.seen.starts[-1].attempt) == (1, 2)
        await check_nothing_is_left(router, mortal, other, prefill)


async def test_the_only_decode_rank_may_restart_before_its_first_token(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    decode.behaviour.hang = True
    asking = asyncio.create_task(answer_to(router, SHORT))
    await until(lambda: decode.live)
    await decode.server.kill()
    decode.behaviour.hang = False
    await decode.server.restart()
    assert await asking == expected_ids(SHORT, 6)
    await check_nothing_is_left(router, decode, prefill)


async def test_a_decode_rank_that_never_comes_back_ends_the_request_with_the_truth(
    model_dir: Path, decode: FakeDecode
) -> None:
    decode.behaviour.hang = True
    async with running_router(model_dir, [decode], prefill_replicas=0, queue_timeout_seconds=0.5) as router:
        asking = asyncio.create_task(failure_of(router, SHORT))
        await until(lambda: decode.live)
        await decode.server.kill()
        assert await asking == (503, "unavailable")
        await check_nothing_is_left(router)


async def test_no_more_attempts_than_allowed_are_made(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.refuse_with = CapacityError("full", retry_after_s=3)
    async with running_router(model_dir, [decode], prefill_replicas=0, retry_max=2) as router:
        response = await router.http.post("/v1/completions", json={"prompt": SHORT, "max_tokens": 6})
        assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert [work.attempt for work in decode.seen.starts] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "status"),
    [(InternalError("a bug"), 500), (InvalidFieldError("prompt", "no"), 400), (AuthenticationError("no"), 500)],
)
async def test_what_a_decode_rank_says_for_good_is_passed_on_once(
    router: RouterUnderTest, decode: FakeDecode, error: ServingError, status: int
) -> None:
    decode.behaviour.refuse_with = error
    assert (await failure_of(router, SHORT))[0] == status
    assert len(decode.seen.starts) == 1


async def test_a19_a_decode_leg_that_fails_ends_the_prefill_leg(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.hang = True
    decode.behaviour.refuse_with = InternalError("a bug")
    assert (await failure_of(router))[0] == 500
    await until(lambda: prefill.cancelled, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


async def test_a_decode_rank_lost_while_prefill_runs_takes_the_prefill_along_to_the_next_attempt(
    model_dir: Path, prefill: FakePrefill
) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    prefill.behaviour.step = asyncio.Event()
    async with running_router(model_dir, [*ranks, prefill]) as router:
        asking = asyncio.create_task(answer_to(router))
        await until(lambda: prefill.running)
        victim = ranks[0] if ranks[0].seen.starts else ranks[1]
        await victim.server.kill()
        await until(lambda: len(prefill.seen.starts) == 2)
        prefill.behaviour.step.set()
        assert await asking == RIGHT
        assert [ticket.attempt for ticket in prefill.seen.tickets] == [1, 2]
        assert prefill.cancelled == 1


async def test_what_a_rank_says_after_the_end_is_not_heard(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.repeat_finish = True
    for _ in range(3):
        assert await answer_to(router, SHORT) == expected_ids(SHORT, 6)


async def test_a_draining_rank_gets_no_new_request(model_dir: Path) -> None:
    ranks = [FakeDecode(f"decode-{index}") for index in range(2)]
    ranks[0].server.draining = True
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        for _ in range(6):
            await answer_to(router, SHORT)
    assert (len(ranks[0].seen.starts), len(ranks[1].seen.starts)) == (0, 6)


async def test_d2_unrelated_requests_use_every_rank(model_dir: Path) -> None:
    ranks = [FakeDecode(f"decode-{index}", Behaviour(pause_s=0.002)) for index in range(4)]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        prompts = [[400 + index] for index in range(40)]
        answers = await asyncio.gather(*(answer_to(router, prompt) for prompt in prompts))
        assert answers == [expected_ids(prompt, 6) for prompt in prompts]
    assert min(len(rank.seen.starts) for rank in ranks) >= 6


# ------------------------------------------------------------------------------------------------- a stream that broke


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_e10_a_decode_rank_that_dies_in_mid_stream_never_looks_finished(
    router: RouterUnderTest, decode: FakeDecode, prompt: list[int]
) -> None:
    decode.behaviour.die_after_tokens = 3
    async with stream_of(router, prompt=prompt, max_tokens=9, return_token_ids=True) as events:
        got = [event async for event in events]
    assert "[DONE]" not in got
    chunks = [json.loads(event) for event in got]
    assert chunks[-1]["error"]["code"] == "worker_lost"
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert all(choice["finish_reason"] is None for choice in choices)
    assert [token for choice in choices for token in choice["token_ids"]] == expected_ids(prompt, 3)
    decode.behaviour.die_after_tokens = None
    assert await answer_to(router, prompt) == expected_ids(prompt, 6)


async def test_e10_the_same_loss_is_an_error_status_when_nothing_was_streamed(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.behaviour.die_after_tokens = 3
    assert await failure_of(router, SHORT) == (502, "worker_lost")


async def test_e10_a_conversation_is_broken_off_in_the_same_way(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.die_after_tokens = 3
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    events = await router.stream("/v1/chat/completions", **body)
    assert json.loads(events[-1])["error"]["code"] == "worker_lost"
    assert not any('"finish_reason":"' in event for event in events)


async def test_an_error_of_one_choice_ends_all_choices(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.fail_after_tokens = (2, InternalError("a bug"))
    async with stream_of(router, prompt=[SHORT, LONG[:6]], n=2, max_tokens=9) as events:
        got = [event async for event in events]
    assert json.loads(got[-1])["error"]["code"] == "internal_error"
    await check_nothing_is_left(router, decode)


async def test_a_deadline_in_mid_stream_is_an_error_event(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour = Behaviour(pause_s=0.2)
    limits = {"request_timeout_seconds": 0.5, "queue_timeout_seconds": 0.5}
    async with running_router(model_dir, [decode], prefill_replicas=0, **limits) as router:
        async with stream_of(router, prompt=SHORT, max_tokens=50) as events:
            got = [event async for event in events]
        assert json.loads(got[-1])["error"]["code"] == "deadline_exceeded"
        assert len(got) > 1
        await check_nothing_is_left(router, decode)


# ---------------------------------------------------------------------------------------------------- the client leaves


class Connection:
    """A client that closes its socket when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def post(cls, router: RouterUnderTest, body: dict[str, Any]) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        writer.write(head.encode() + content)
        await writer.drain()
        return cls(reader, writer)

    def leave(self) -> None:
        self._writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_a7_a_client_that_leaves_in_mid_prefill_ends_both_legs(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, stream: bool
) -> None:
    prefill.behaviour.hang = True
    client = await Connection.post(router, {"prompt": LONG, "stream": stream})
    await until(lambda: prefill.running and decode.live)
    client.leave()
    await until(lambda: prefill.cancelled and decode.seen.cancels, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize("stream", [False, True])
async def test_a7_a_client_that_leaves_after_the_hand_off_releases_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, stream: bool
) -> None:
    decode.behaviour.step = asyncio.Event()
    client = await Connection.post(router, {"prompt": LONG, "stream": stream})
    await until(lambda: decode.seen.handoffs)
    client.leave()
    await until(lambda: decode.seen.cancels, timeout_s=1.0)
    await check_nothing_is_left(router, decode, prefill)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["local", "remote prefill"])
async def test_a6_a_client_that_leaves_between_tokens_releases_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, prompt: list[int], stream: bool
) -> None:
    decode.behaviour = Behaviour(pause_s=0.01)
    client = await Connection.post(router, {"prompt": prompt, "stream": stream, "max_tokens": 2000})
    if stream:
        await client.reader.readuntil(b"data: ")
    else:
        await until(lambda: decode.live)
    client.leave()
    await check_nothing_is_left(router, decode, prefill)


async def test_a6_a_client_that_leaves_the_queue_gives_up_its_place(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.hang = True
    async with running_router(model_dir, [decode], prefill_replicas=0, max_concurrent_requests=1) as router:
        first = await Connection.post(router, {"prompt": SHORT})
        await until(lambda: decode.live)
        second = await Connection.post(router, {"prompt": SHORT})
        await until(lambda: router.front.admission.waiting == 1)
        second.leave()
        await until(lambda: router.front.admission.waiting == 0, timeout_s=1.0)
        first.leave()
        await check_nothing_is_left(router, decode)


async def test_a8_sockets_closed_within_milliseconds_leave_no_work_behind(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    decode.behaviour = Behaviour(pause_s=0.05)
    for index in range(60):
        prompt = LONG if index % 2 else SHORT
        client = await Connection.post(router, {"prompt": prompt, "stream": index % 3 == 0, "max_tokens": 1000})
        await asyncio.sleep(index % 6 / 1000)
        client.leave()
    await until(lambda: router.front.admission.running == 0, timeout_s=2.0)
    await check_nothing_is_left(router, decode, prefill)
    assert await answer_to(router, SHORT) == expected_ids(SHORT, 6)


# ---------------------------------------------------------------------------------------------------------- too much


async def test_more_than_may_wait_are_told_to_come_back(model_dir: Path, decode: FakeDecode) -> None:
    decode.behaviour.step = asyncio.Event()
    limits = {"max_concurrent_requests": 1, "queue_size": 1}
    async with running_router(model_dir, [decode], prefill_replicas=0, **limits) as router:
        inside = asyncio.create_task(answer_to(router, SHORT))
        await until(lambda: decode.live)
        waiting = asyncio.create_task(answer_to(router, SHORT))
        await until(lambda: router.front.admission.waiting == 1)
        response = await router.http.post("/v1/completions", json={"prompt": SHORT})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        decode.behaviour.step.set()
        assert await inside == await waiting == expected_ids(SHORT, 6)


@pytest.mark.parametrize("only_prefill", [False, True])
async def test_without_decode_ranks_the_answer_is_503_and_soon(
    model_dir: Path, prefill: FakePrefill, only_prefill: bool
) -> None:
    async with running_router(model_dir, [prefill] if only_prefill else []) as router:
        async with asyncio.timeout(3.0):
            response = await router.http.post("/v1/completions", json={"prompt": SHORT})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert response.headers["retry-after"]


# ------------------------------------------------------------------------------------------------- both ways the same


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
