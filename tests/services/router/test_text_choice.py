"""E1: a stop string never reaches the client in part, however tokens and steps cut it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.router.fake_ranks import FakeDecode, says
from tests.services.router.router_under_test import RouterUnderTest
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
TEXT = "The quick brown fox and its own fox"
STOP = "own fox"
CUT = TEXT.index(STOP)


def cut_at(split: int) -> list[int]:
    """The text as tokens, none of which crosses `split`."""
    return TOKENIZER.encode(TEXT[:split]) + TOKENIZER.encode(TEXT[split:])


async def streamed(router: RouterUnderTest, **body: Any) -> tuple[list[str], dict[str, Any]]:
    events = await router.stream(max_tokens=64, stream_options={"include_usage": True}, **body)
    chunks = [json.loads(event) for event in events[:-1]]
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]


@pytest.mark.parametrize("burst", [1, 2, 3, 4, 5, 6, 7, 8])
async def test_e1_no_part_of_a_stop_string_is_sent_at_any_split(
    router: RouterUnderTest, decode: FakeDecode, burst: int
) -> None:
    decode.behaviour.burst = burst
    for split in range(CUT - 2, CUT + len(STOP) + 3):
        decode.behaviour.next_token = says(cut_at(split))
        whole = await router.complete(prompt="Hello", max_tokens=64, stop=[STOP])
        texts, usage = await streamed(router, stop=[STOP])
        assert "".join(texts) == whole["choices"][0]["text"] == TEXT[:CUT]
        assert whole["choices"][0]["stop_reason"] == STOP
        assert usage == whole["usage"]
        sent = ""
        for text in texts:
            sent += text
            assert TEXT[:CUT].startswith(sent), "what was sent is never taken back"
    assert decode.live == {}


@pytest.mark.parametrize("burst", [1, 3, 8])
async def test_e1_an_ending_that_only_looked_like_a_stop_is_flushed(
    router: RouterUnderTest, decode: FakeDecode, burst: int
) -> None:
    decode.behaviour.burst = burst
    for split in range(CUT, len(TEXT)):
        decode.behaviour.next_token = says(cut_at(split))
        texts, _ = await streamed(router, stop=[STOP + "es", "fox and dogs"])
        assert "".join(texts) == TEXT


@pytest.mark.parametrize("burst", [1, 2, 5])
async def test_a_stop_string_may_be_kept_in_the_text(router: RouterUnderTest, decode: FakeDecode, burst: int) -> None:
    decode.behaviour.burst = burst
    decode.behaviour.next_token = says(cut_at(CUT + 3))
    body: dict[str, Any] = {"stop": "fox", "include_stop_str_in_output": True}
    whole = await router.complete(prompt="Hello", max_tokens=64, **body)
    texts, usage = await streamed(router, **body)
    assert "".join(texts) == whole["choices"][0]["text"] == "The quick brown fox"
    assert usage == whole["usage"]


@pytest.mark.parametrize("burst", [1, 2, 3, 7])
async def test_characters_that_span_tokens_are_sent_whole(
    router: RouterUnderTest, decode: FakeDecode, burst: int
) -> None:
    text = "Grüße 🐋 鯨"
    decode.behaviour.burst = burst
    decode.behaviour.next_token = says([token for byte in text for token in TOKENIZER.encode(byte)])
    texts, _ = await streamed(router)
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


async def test_a_stop_string_ends_the_work_of_the_rank_at_once(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("stop here " + "and never " * 1000))
    answer = await router.complete(prompt="Hello", max_tokens=2000, stop="here")
    assert answer["usage"]["completion_tokens"] == len(TOKENIZER.encode("stop here"))
    await router.complete(prompt="Hello", max_tokens=1)  # behind the cancel, on the same stream
    assert len(decode.seen.cancels) == 1
    assert decode.live == {}
