"""`/v1/chat/completions` as JSON: one object, or a chunk for every step. The gRPC front sends the same JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from whalepod.engine.interface import SampledToken

from .chat import ChatRequest, open_chat
from .chat_choice import ChatDelta, ChatEnd
from .completions_http import ResponseHead
from .front_door import Caller, FrontDoor
from .http_errors import json_text
from .http_stream import DONE_FRAME, data_frame
from .request_record import RequestRecord
from .usage import Usage, total_usage


async def chat_answer(
    front: FrontDoor, request: ChatRequest, caller: Caller, head: ResponseHead, record: RequestRecord
) -> dict[str, Any]:
    """A `chat.completion` object when all choices are done. Raises ServingError."""
    async with open_chat(front, request, caller, response_id=head.id) as opened:
        prompt_tokens = len(opened.prompt.prompt_ids)
        responses = [
            request.protocol.response(head.id, head.model, head.created, prompt_tokens, 0)
            for _ in range(request.choices)
        ]
        tokens: list[list[int]] = [[] for _ in responses]
        ends: dict[int, ChatEnd] = {}
        async for index, event in opened.events:
            for chunk in event.chunks:
                responses[index].accumulate(chunk)
            tokens[index] += [token.id for token in event.tokens]
            if isinstance(event, ChatEnd):
                ends[index] = event
        wholes: list[dict[str, Any]] = [json.loads(response.to_json()) for response in responses]
        usage = _total([_usage_of(ends[index]) for index in range(len(wholes))])
        record.note_result(usage, ends[0].route)
        choices = [_choice_of(whole, index) for index, whole in enumerate(wholes)]
        if request.return_token_ids:
            for choice, ids in zip(choices, tokens, strict=True):
                choice["token_ids"] = ids
        answer = wholes[0] | {"choices": choices, "usage": usage.to_json()}
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = opened.book.to_json(opened.prompt.prompt_ids, front.language)
        if request.return_token_ids:
            answer["prompt_token_ids"] = list(opened.prompt.prompt_ids)
        return answer


async def chat_chunks(
    front: FrontDoor, request: ChatRequest, caller: Caller, head: ResponseHead, record: RequestRecord
) -> AsyncGenerator[str, None]:
    """`chat.completion.chunk` objects as JSON text; the last one carries the usage. Raises ServingError."""
    rewrite = request.choices > 1 or request.return_token_ids
    usages: dict[int, Usage] = {}
    chunk: dict[str, Any] = {}
    async with open_chat(front, request, caller, response_id=head.id) as opened:
        prompt_ids = opened.prompt.prompt_ids if request.return_token_ids else None
        async for index, event in opened.events:
            tokens = event.tokens
            for text in [chunk.to_json() for chunk in event.chunks]:
                if not rewrite and isinstance(event, ChatDelta):
                    yield text
                    continue
                chunk = json.loads(text)
                if request.return_token_ids:
                    _add_ids(chunk, prompt_ids, tokens)
                    prompt_ids, tokens = None, ()
                if isinstance(event, ChatEnd) and chunk.get("usage"):
                    usages[index] = _usage_of(event)
                    record.note_result(_total(list(usages.values())), event.route)
                    chunk["usage"] = usages[index].to_json() if request.choices == 1 else None
                chunk["choices"] = [_choice_of(chunk, index)]
                yield json_text(chunk)
    if request.choices > 1:
        yield json_text(chunk | {"choices": [], "usage": _total(list(usages.values())).to_json()})


async def chat_frames(
    front: FrontDoor, request: ChatRequest, caller: Caller, head: ResponseHead, record: RequestRecord
) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to `[DONE]`."""
    async for chunk in chat_chunks(front, request, caller, head, record):
        yield data_frame(chunk)
    yield DONE_FRAME


def _add_ids(chunk: dict[str, Any], prompt_ids: Sequence[int] | None, tokens: Sequence[SampledToken]) -> None:
    for choice in chunk["choices"]:
        choice["token_ids"] = [token.id for token in tokens]
    if prompt_ids is not None:
        chunk["prompt_token_ids"] = list(prompt_ids)


def _choice_of(answer: dict[str, Any], index: int) -> dict[str, Any]:
    """The only choice of one parser's object, under its own index."""
    (choice,) = answer["choices"]
    return {**choice, "index": index}


def _usage_of(end: ChatEnd) -> Usage:
    return Usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.reasoning_tokens)


def _total(usages: Sequence[Usage]) -> Usage:
    return total_usage((0, usage) for usage in usages)
