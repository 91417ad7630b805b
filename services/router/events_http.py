"""`/v1/responses` and `/v1/messages` as JSON: one object, or the named events that build it up.

The released layer makes the events; what only we know is put into them: exact token counts, and what the client asked
to have repeated.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from whalepod.model.protocols import MESSAGES, RESPONSES

from .chat import ChatRequest, chat_prompt, open_chat
from .chat_choice import ChatDelta, ChatEnd
from .completions_http import ResponseHead
from .front_door import Caller, FrontDoor
from .http_errors import json_text
from .http_stream import data_frame
from .relay import Relay
from .request_record import RequestRecord
from .usage import Usage

ECHOED = ("metadata", "parallel_tool_calls", "max_tool_calls", "prompt_cache_key", "safety_identifier", "truncation")
"""Settings of a Responses request that its objects repeat and the released layer leaves out."""


async def events_answer(
    front: FrontDoor, request: ChatRequest, caller: Caller, head: ResponseHead, record: RequestRecord
) -> dict[str, Any]:
    """The whole object. Raises ServingError."""
    async with open_chat(front, request, caller, response_id=head.id) as opened:
        response = request.protocol.response(head.id, head.model, head.created, len(opened.prompt.prompt_ids), 0)
        end: ChatEnd | None = None
        async for _, event in opened.events:
            for chunk in event.chunks:
                response.accumulate(chunk)
            end = event if isinstance(event, ChatEnd) else end
    assert end is not None, "an answer has an end"
    usage = usage_of(end)
    record.note_result(usage, end.route)
    answer: dict[str, Any] = json.loads(response.to_json())
    _ANSWERS[request.protocol.name].complete(answer, request, usage)
    return answer


async def events_frames(
    front: FrontDoor,
    request: ChatRequest,
    caller: Caller,
    head: ResponseHead,
    record: RequestRecord,
    relay: Relay[bytes] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, but for those that `relay` is given; the last one is the protocol's own. Raises
    ServingError."""

    def frames_of(delta: ChatDelta) -> bytes:
        return b"".join(_frames_of(delta, request, record))

    deltas = None if relay is None else relay.through(frames_of)
    opening = open_chat(front, request, caller, response_id=head.id, relay=deltas)
    async with opening as opened, aclosing(opened.events) as events:
        async for _, event in events:
            for frame in _frames_of(event, request, record):
                yield frame


def _frames_of(event: ChatDelta | ChatEnd, request: ChatRequest, record: RequestRecord) -> list[bytes]:
    form = _ANSWERS[request.protocol.name]
    usage = None
    if isinstance(event, ChatEnd):
        usage = usage_of(event)
        record.note_result(usage, event.route)
    frames: list[bytes] = []
    for chunk in event.chunks:
        name, text = request.protocol.response.sse_event_name(chunk), chunk.to_json()
        if name in form.completed_events:
            told = json.loads(text)
            form.complete(told.get("response", told), request, usage)
            text = json_text(told)
        frames.append(data_frame(text, event=name))
    return frames


async def count_tokens(front: FrontDoor, request: ChatRequest) -> dict[str, Any]:
    """`/v1/messages/count_tokens`. Raises RequestError."""
    return {"input_tokens": len((await chat_prompt(front, request)).prompt_ids)}


def usage_of(end: ChatEnd) -> Usage:
    return Usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.reasoning_tokens)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is added to one protocol's objects. `usage` None: the answer has not ended."""

    complete: Callable[[dict[str, Any], ChatRequest, Usage | None], None]
    completed_events: frozenset[str]


def _complete_response(response: dict[str, Any], request: ChatRequest, usage: Usage | None) -> None:
    response |= {name: request.body[name] for name in ECHOED if request.body.get(name) is not None}
    if usage is not None:
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _complete_message(message: dict[str, Any], request: ChatRequest, usage: Usage | None) -> None:
    del request
    if usage is not None:
        message["usage"] |= {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


_ANSWERS = {
    RESPONSES.name: _Answer(
        _complete_response,
        frozenset({"response.created", "response.in_progress", "response.completed", "response.incomplete"}),
    ),
    MESSAGES.name: _Answer(_complete_message, frozenset({"message_delta"})),
}
