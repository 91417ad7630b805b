"""One engine step's events for one router, as the bytes of `DecodeService.GenerateResponse.packed_step`.

A message is a msgpack array, one for every step that has something to say to that router:

    [version, [load…], [[request_id, attempt, kind, …], …]]

    kind 0, tokens:    cached tokens | nil, packed ids, packed logprobs, packed top counts (u8), packed top ids,
                       packed top logprobs
    kind 2, prompt:    position of the first, the same but cached tokens, of tokens of the prompt
    kind 1, finished:  reason, matched stop id | nil, cached tokens, replayed tokens, error | nil

Ids are little-endian uint32 and log-probabilities little-endian float32, so that a log-probability arrives with the
bits it was computed with. An error is `[kind, message, {attribute: value}]` (`cluster/error_codes.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from whalepod.core.ids import REQUEST_ID_BYTES, RequestId
from whalepod.engine.interface import (
    FinishedEvent,
    FinishReason,
    HandoffEvent,
    PromptTokensEvent,
    RankLoad,
    SampledToken,
    StepEvent,
    TokensEvent,
)

from .error_codes import ErrorRecord, error_from_record, record_of_error

VERSION = 1
TOKENS, FINISHED, PROMPT = 0, 1, 2

# Numbers on the wire never change their meaning; a new reason gets a new number.
REASON_CODES = {FinishReason.STOP: 0, FinishReason.LENGTH: 1, FinishReason.ABORT: 2, FinishReason.ERROR: 3}
REASONS = {code: reason for reason, code in REASON_CODES.items()}

DecodeEvent = TokensEvent | PromptTokensEvent | FinishedEvent
"""What a decode rank reports. Hand-offs are answers of `PrefillService.Run`, never step events."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    load: RankLoad
    events: tuple[DecodeEvent, ...] = ()


class StepMessageError(ValueError):
    """Bytes that are no step message of this version."""


def encode_step(events: Sequence[StepEvent], load: RankLoad) -> bytes:
    """Pack the events of one step. A `HandoffEvent` among them is a mistake of the caller."""
    packed: list[list[Any]] = []
    for event in events:
        assert not isinstance(event, HandoffEvent), "a decode rank reports no hand-off"
        packed.append([event.request_id, event.attempt, *_pack_event(event)])
    return cast(bytes, msgpack.packb([VERSION, _pack_load(load), packed]))


def decode_step(data: bytes) -> StepMessage:
    """The inverse of `encode_step`. Raises StepMessageError on anything else."""
    try:
        version, load, events = msgpack.unpackb(data)
        if version != VERSION:
            raise StepMessageError(f"step message version {version}, expected {VERSION}")
        return StepMessage(load=RankLoad(*load), events=tuple(_unpack_event(*event) for event in events))
    except StepMessageError:
        raise
    except (ValueError, TypeError, KeyError, struct.error, msgpack.UnpackException) as error:
        raise StepMessageError(f"malformed step message: {error}") from error


def _pack_load(load: RankLoad) -> list[int]:
    return [
        load.running,
        load.waiting,
        load.blocks_free,
        load.blocks_total,
        load.prefill_tokens_queued,
        load.slots_total,
    ]


def _pack_event(event: DecodeEvent) -> list[Any]:
    match event:
        case TokensEvent():
            return [TOKENS, event.cached_tokens, *_pack_tokens(event.tokens)]
        case PromptTokensEvent():
            return [PROMPT, event.start, *_pack_tokens(event.tokens)]
        case FinishedEvent():
            return _pack_finished(event)


def _pack_tokens(tokens: Sequence[SampledToken]) -> list[bytes]:
    with_logprobs = bool(tokens) and tokens[0].logprob is not None
    assert all((token.logprob is not None) == with_logprobs for token in tokens), "log-probabilities for all or none"
    ids = struct.pack(f"<{len(tokens)}I", *(token.id for token in tokens))
    if not with_logprobs:
        return [ids, b"", b"", b"", b""]
    top_ids = [top_id for token in tokens for top_id in token.top_ids]
    top_logprobs = [logprob for token in tokens for logprob in token.top_logprobs]
    return [
        ids,
        struct.pack(f"<{len(tokens)}f", *(token.logprob for token in tokens)),
        bytes(len(token.top_ids) for token in tokens),
        struct.pack(f"<{len(top_ids)}I", *top_ids),
        struct.pack(f"<{len(top_logprobs)}f", *top_logprobs),
    ]


def _pack_finished(event: FinishedEvent) -> list[Any]:
    error: list[Any] | None = None
    if event.error is not None:
        record = record_of_error(event.error)
        error = [record.kind, record.message, record.attributes]
    return [
        FINISHED,
        REASON_CODES[event.reason],
        event.matched_stop_id,
        event.cached_tokens,
        event.replayed_tokens,
        error,
    ]


def _unpack_event(request_id: object, attempt: int, kind: int, *fields: Any) -> DecodeEvent:  # noqa: ANN401  msgpack
    if not isinstance(request_id, bytes) or len(request_id) != REQUEST_ID_BYTES:
        raise StepMessageError(f"a request id has {REQUEST_ID_BYTES} bytes")
    if kind == TOKENS:
        cached_tokens, *packed = fields
        return TokensEvent(RequestId(request_id), attempt, _unpack_tokens(*packed), cached_tokens)
    if kind == PROMPT:
        start, *packed = fields
        return PromptTokensEvent(RequestId(request_id), attempt, start, _unpack_tokens(*packed))
    if kind == FINISHED:
        return _unpack_finished(RequestId(request_id), attempt, *fields)
    raise StepMessageError(f"unknown event kind {kind}")


def _unpack_tokens(
    ids: bytes, logprobs: bytes, top_counts: bytes, top_ids: bytes, top_logprobs: bytes
) -> tuple[SampledToken, ...]:
    if len(ids) == 4 and not logprobs:  # most events: one token without log-probabilities
        return (SampledToken(int.from_bytes(ids, "little")),)
    token_ids: tuple[int, ...] = struct.unpack(f"<{len(ids) // 4}I", ids)
    if not logprobs:
        return tuple(map(SampledToken, token_ids))
    values: tuple[float, ...] = struct.unpack(f"<{len(token_ids)}f", logprobs)
    alternatives: tuple[int, ...] = struct.unpack(f"<{sum(top_counts)}I", top_ids)
    alternative_values: tuple[float, ...] = struct.unpack(f"<{sum(top_counts)}f", top_logprobs)
    tokens: list[SampledToken] = []
    start = 0
    for token_id, logprob, count in zip(token_ids, values, top_counts, strict=True):
        end = start + count
        tokens.append(SampledToken(token_id, logprob, alternatives[start:end], alternative_values[start:end]))
        start = end
    return tuple(tokens)


def _unpack_finished(
    request_id: RequestId,
    attempt: int,
    reason: int,
    matched_stop_id: int | None,
    cached_tokens: int,
    replayed_tokens: int,
    error: Sequence[Any] | None,
) -> FinishedEvent:
    return FinishedEvent(
        request_id=request_id,
        attempt=attempt,
        reason=REASONS[reason],
        error=None if error is None else error_from_record(ErrorRecord(*error)),
        matched_stop_id=matched_stop_id,
        cached_tokens=cached_tokens,
        replayed_tokens=replayed_tokens,
    )
