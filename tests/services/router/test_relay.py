"""The short way of a token gives a client what the long one does, in the same order, and takes only what it should."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids, says
from tests.services.router.router_under_test import (
    RouterUnderTest,
    check_nothing_is_left,
    running_router,
    stream_of,
    until,
)
from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import FinishedEvent, FinishReason, SampledToken, TokensEvent
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.services.router.decode_stream import Inbox
from whalepod.services.router.http_protocol import BoundedHttpProtocol, Exchange
from whalepod.services.router.relay import Relay

TOKENIZER = shipped_tokenizer()
PROMPT = [400 + index for index in range(9)]
SAYING = {"messages": [{"role": "user", "content": "Hi"}], "thinking": {"type": "disabled"}}
THINKING = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = (
    "Let me look.\n\n<｜DSML｜tool_calls>"
    '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'
    "</｜DSML｜invoke></｜DSML｜tool_calls>"
)
CHAT = "/v1/chat/completions"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": ("/v1/completions", {}, "A whale swam on, Grüße 🐋."),
    "completion, everything told": (
        "/v1/completions",
        {"echo": True, "logprobs": 2, "return_token_ids": True, "stream_options": {"include_usage": True}},
        "A whale swam on, Grüße 🐋.",
    ),
    "completion of two choices": ("/v1/completions", {"n": 2}, "A whale swam on."),
    "completion with a stop string": ("/v1/completions", {"stop": ["swam on"]}, "A whale swam on, and on."),
    "conversation": (CHAT, SAYING, "A whale swam on, Grüße 🐋."),
    "conversation with ids": (CHAT, SAYING | {"return_token_ids": True, "logprobs": True}, "A whale swam on."),
    "conversation with reasoning": (CHAT, THINKING, "I think so.</think>\n\nYes."),
    "conversation with a tool": (CHAT, SAYING | {"tools": [TOOL]}, CALL),
    "conversation with a stop string": (CHAT, SAYING | {"stop": ["swam on"]}, "A whale swam on, and on."),
    "responses": ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "none"}}, "A whale swam on."),
    "messages": ("/v1/messages", SAYING | {"max_tokens": 60}, "A whale swam on."),
}
LONG_WAY_ONLY = {"completion of two choices", "completion with a stop string", "conversation with a stop string"}


class Watched(asyncio.Event):
    """What ranks wait for before a step: that all they have said has been read, and the reader waits for more. Counts
    the tokens that came, and those that were written the short way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.said = self.heard = self.relayed = 0
        self._inbox: Inbox | None = None
        put, write = Inbox.put, Exchange.write

        def noted_put(inbox: Inbox, item: object) -> None:
            put(inbox, item)
            self.heard += isinstance(item, TokensEvent)
            self._inbox = inbox
            if isinstance(item, FinishedEvent | Exception):
                self.begin()

        def noted_write(exchange: Exchange, body: bytes) -> None:
            write(exchange, body)
            self.relayed += 1

        patch.setattr(Inbox, "put", noted_put)
        patch.setattr(Exchange, "write", noted_write)

    def begin(self) -> None:
        """With another attempt, or another request."""
        self._inbox, self.said = None, self.heard

    async def wait(self) -> Any:
        await until(lambda: self.heard == self.said and (self._inbox is None or _waits(self._inbox)))
        self.said += 1
        return True


def _waits(inbox: Inbox) -> bool:
    return inbox._arrival is not None and not inbox._arrival.done()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def events_of(router: RouterUnderTest, path: str, body: dict[str, Any]) -> list[str]:
    """Lines of the answer; what differs from request to request is taken out."""
    body = {"max_tokens": 60, "temperature": 0, "stream": True, **body}
    body |= {"prompt": PROMPT} if path == "/v1/completions" else {}
    async with router.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        return [_without_names(line) async for line in response.aiter_lines() if line]


def _without_names(line: str) -> str:
    if not line.startswith("data: {"):
        return line
    return json.dumps(_cleaned(json.loads(line.removeprefix("data: "))))


def _cleaned(value: Any) -> Any:
    if isinstance(value, list):
        return [_cleaned(member) for member in value]
    if not isinstance(value, dict):
        return value
    names = {"id", "item_id", "created", "created_at", "completed_at"}
    return {name: _cleaned(member) for name, member in value.items() if name not in names}


@pytest.mark.parametrize("case", CASES)
async def test_both_ways_tell_a_client_the_same(
    router: RouterUnderTest, decode: FakeDecode, watched: Watched, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path, body, answer = CASES[case]
    ids = TOKENIZER.file.encode(answer, add_special_tokens=False).ids
    decode.behaviour = Behaviour(next_token=says(ids))
    if case != "completion of two choices":
        decode.behaviour.step = watched
    short = await events_of(router, path, body)
    assert (watched.relayed > 0) == (case not in LONG_WAY_ONLY)
    relayed = watched.relayed
    await until(lambda: not decode.live)
    watched.begin()
    monkeypatch.setattr(Exchange, "is_open", lambda _: False)
    long = await events_of(router, path, body)
    assert watched.relayed == relayed
    assert sorted(short) == sorted(long) if case == "completion of two choices" else short == long


async def test_every_token_but_the_first_goes_the_short_way(
    router: RouterUnderTest, decode: FakeDecode, watched: Watched
) -> None:
    decode.behaviour = Behaviour(step=watched)
    async with stream_of(router, prompt=PROMPT, max_tokens=30, return_token_ids=True) as events:
        got = [json.loads(event) async for event in events if event != "[DONE]"]
    assert [token for event in got for token in event["choices"][0]["token_ids"]] == expected_ids(PROMPT, 30)
    assert watched.relayed == 29


@pytest.fixture
async def two_ranks(model_dir: Path) -> AsyncIterator[tuple[RouterUnderTest, list[FakeDecode]]]:
    ranks = [FakeDecode("decode-0"), FakeDecode("decode-1")]
    async with running_router(model_dir, ranks, prefill_replicas=0) as router:
        yield router, ranks


async def test_a_stream_goes_on_elsewhere_after_tokens_that_went_the_short_way(
    two_ranks: tuple[RouterUnderTest, list[FakeDecode]], watched: Watched
) -> None:
    router, ranks = two_ranks
    for rank in ranks:
        rank.behaviour = Behaviour(step=watched, die_after_tokens=5)
    async with stream_of(router, prompt=PROMPT, max_tokens=12, return_token_ids=True) as events:
        got = [json.loads(event) async for event in events if event != "[DONE]"]
    assert [token for event in got for token in event["choices"][0]["token_ids"]] == expected_ids(PROMPT, 12)
    starts = [len(start.resumed_ids) for rank in ranks for start in rank.seen.starts]
    assert sorted(starts) == [0, 5, 10]
    assert watched.relayed == 12 - len(starts)


async def test_a_client_that_leaves_between_tokens_of_the_short_way_releases_its_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, watched: Watched
) -> None:
    decode.behaviour = Behaviour(step=watched)
    async with stream_of(router, prompt=PROMPT, max_tokens=2000) as events:
        async for _ in events:
            if watched.relayed > 3:
                break
    await until(lambda: decode.seen.cancels)
    await check_nothing_is_left(router, decode, prefill)


async def test_tokens_for_a_client_that_does_not_read_wait_and_come_in_order(
    router: RouterUnderTest, decode: FakeDecode, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = BoundedHttpProtocol.connection_made

    def made_small(protocol: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(protocol, transport)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", made_small)
    decode.behaviour = Behaviour()
    body = {"prompt": PROMPT, "max_tokens": 1000, "stream": True, "return_token_ids": True, "logprobs": 20}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", router.http_port))
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client, limit=4096)
        writer.write(head.encode() + content)
        await until(lambda: decode.seen.starts and not decode.live, timeout_s=30.0)
        await until(lambda: watched.heard == 1000)
        assert watched.relayed < 999, "all was written though nobody reads"
        told = (await reader.read(-1)).decode()
        writer.close()
    lines = [line.removeprefix("data: ") for line in told.splitlines() if line.startswith("data: {")]
    ids = [token for line in lines for token in json.loads(line)["choices"][0]["token_ids"]]
    assert ids == expected_ids(PROMPT, 1000)


def tokens(*ids: int) -> TokensEvent:
    return TokensEvent(RequestId(b"a" * 16), 1, tuple(SampledToken(token_id) for token_id in ids))


END = FinishedEvent(RequestId(b"a" * 16), 1, FinishReason.LENGTH)


class Taking:
    def __init__(self) -> None:
        self.open = True
        self.taken: list[TokensEvent] = []
        self.fails: Exception | None = None

    def push(self, event: TokensEvent) -> None:
        if self.fails is not None:
            raise self.fails
        self.taken.append(event)

    @property
    def relay(self) -> Relay[TokensEvent]:
        return Relay(lambda: self.open, self.push)


async def test_a_relay_takes_tokens_only_while_the_reader_waits() -> None:
    inbox, taking = Inbox(), Taking()
    inbox.relay = taking.relay
    inbox.put(tokens(1))  # nobody has begun to read
    assert await inbox.take() == [tokens(1)]
    inbox.put(tokens(2))  # the reader is busy
    assert await inbox.take() == [tokens(2)]
    reading = asyncio.create_task(inbox.take())
    await until(lambda: _waits(inbox))
    inbox.put(tokens(3))
    inbox.put(END)
    inbox.put(tokens(4))  # behind something that the reader has not seen yet
    assert await reading == [END, tokens(4)]
    assert taking.taken == [tokens(3)]


async def test_a_relay_that_is_closed_leaves_tokens_to_the_reader() -> None:
    inbox, taking = Inbox(), Taking()
    inbox.relay, taking.open = taking.relay, False
    reading = asyncio.create_task(inbox.take())
    await until(lambda: _waits(inbox))
    inbox.put(tokens(1))
    taking.open = True
    inbox.put(tokens(2))
    assert await reading == [tokens(1, 2)]
    assert taking.taken == []


async def test_what_goes_wrong_in_a_relay_is_raised_by_the_reader_alone() -> None:
    inbox, taking = Inbox(), Taking()
    inbox.relay, taking.fails = taking.relay, InternalError("a bug")
    reading = asyncio.create_task(inbox.take())
    await until(lambda: _waits(inbox))
    inbox.put(tokens(1))
    assert await reading == [taking.fails]


async def test_a_reader_that_was_cancelled_gets_nothing_the_short_way() -> None:
    inbox, taking = Inbox(), Taking()
    inbox.relay = taking.relay
    reading = asyncio.create_task(inbox.take())
    await until(lambda: _waits(inbox))
    reading.cancel()
    inbox.put(tokens(1))
    assert taking.taken == []
