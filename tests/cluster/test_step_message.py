"""Step messages arrive as they were sent, bit for bit, and nothing else is taken for one."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.cluster.step_message import StepMessage, StepMessageError, decode_step, encode_step
from whalepod.core.errors import CapacityError, ContextLengthError, InternalError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import (
    FinishedEvent,
    FinishReason,
    Handoff,
    HandoffEvent,
    PromptTokensEvent,
    RankLoad,
    SampledToken,
    TokensEvent,
)

A, B = RequestId(b"a" * 16), RequestId(b"b" * 16)
LOAD = RankLoad(running=3, waiting=1, blocks_free=17, blocks_total=40, prefill_tokens_queued=2**40, slots_total=8)

uint32 = st.integers(0, 2**32 - 1)
float32 = st.floats(width=32, allow_nan=False)


@st.composite
def sampled_tokens(draw: st.DrawFn) -> tuple[SampledToken, ...]:
    ids = draw(st.lists(uint32, max_size=6))
    if not draw(st.booleans()):
        return tuple(SampledToken(token_id) for token_id in ids)
    tokens: list[SampledToken] = []
    for token_id in ids:
        top_ids = draw(st.lists(uint32, max_size=21))
        values = draw(st.lists(float32, min_size=len(top_ids), max_size=len(top_ids)))
        tokens.append(SampledToken(token_id, draw(float32), tuple(top_ids), tuple(values)))
    return tuple(tokens)


@given(st.lists(sampled_tokens(), max_size=4), st.integers(1, 2**31))
def test_tokens_arrive_as_they_were_sent(bursts: list[tuple[SampledToken, ...]], attempt: int) -> None:
    events = (
        *(TokensEvent(A, attempt, tokens, len(tokens) or None) for tokens in bursts),
        *(PromptTokensEvent(A, attempt, attempt, tokens) for tokens in bursts),
    )
    assert decode_step(encode_step(events, LOAD)) == StepMessage(LOAD, events)


@pytest.mark.parametrize("bits", [0x80000000, 0xFF800000, 0x7FC00001, 0xBF7FFFFF, 0x00000001])
def test_log_probabilities_keep_their_bits(bits: int) -> None:
    (logprob,) = struct.unpack("<f", struct.pack("<I", bits))
    (event,) = decode_step(encode_step([TokensEvent(A, 1, (SampledToken(1, logprob),))], LOAD)).events
    assert isinstance(event, TokensEvent)
    value = event.tokens[0].logprob
    assert value is not None
    assert struct.pack("<f", value) == struct.pack("<I", bits)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_arrives(reason: FinishReason) -> None:
    event = FinishedEvent(B, 2, reason, matched_stop_id=7, cached_tokens=64, replayed_tokens=16)
    assert decode_step(encode_step([event], LOAD)).events == (event,)


def test_an_error_arrives_as_its_own_class_with_its_attributes() -> None:
    sent = ContextLengthError(tokens=9, tokens_max=8)
    (event,) = decode_step(encode_step([FinishedEvent(A, 1, FinishReason.ERROR, error=sent)], LOAD)).events
    assert isinstance(event, FinishedEvent)
    assert isinstance(event.error, ContextLengthError)
    assert (str(event.error), event.error.field, event.error.tokens) == (str(sent), "prompt", 9)


def test_a_capacity_error_without_a_guess_still_has_the_attribute() -> None:
    sent = FinishedEvent(A, 1, FinishReason.ERROR, error=CapacityError("full"))
    (event,) = decode_step(encode_step([sent], LOAD)).events
    assert isinstance(event, FinishedEvent)
    assert isinstance(event.error, CapacityError)
    assert event.error.retry_after_s is None


def test_an_error_kind_of_a_newer_peer_is_an_internal_error() -> None:
    data: Any = msgpack.packb([1, [0] * 6, [[A, 1, 1, 3, None, 0, 0, ["of_tomorrow", "what", {}]]]])
    (event,) = decode_step(data).events
    assert isinstance(event, FinishedEvent)
    assert isinstance(event.error, InternalError)


def test_a_hand_off_is_no_step_event() -> None:
    with pytest.raises(AssertionError):
        encode_step([HandoffEvent(A, 1, Handoff(0, None))], LOAD)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([2, [0] * 6, []]),
        msgpack.packb([1, [0] * 7, []]),
        msgpack.packb([1, [0] * 6, [[b"short", 1, 0, None, b"", b"", b"", b"", b""]]]),
        msgpack.packb([1, [0] * 6, [[A, 1, 9]]]),
        msgpack.packb([1, [0] * 6, [[A, 1, 0, None, b"abc", b"", b"", b"", b""]]]),
        msgpack.packb([1, [0] * 6, [[A, 1, 0, 0, b"abcd", b"ab", b"", b"", b""]]]),
        msgpack.packb([1, [0] * 6, [[A, 1, 1, 99, None, 0, 0, None]]]),
        encode_step([TokensEvent(A, 1, (SampledToken(1, 0.0),))], LOAD)[:-1],
        encode_step([], LOAD) + b"\x00",
    ],
)
def test_other_bytes_are_refused_with_one_error(data: bytes) -> None:
    with pytest.raises(StepMessageError):
        decode_step(data)
