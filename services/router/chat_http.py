"""`/v1/chat/completions` as JSON: one object, or a chunk for every step. The gRPC front sends the same JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from .chat import ChatRequest, open_chat
from .chat_choice import ChatDelta, ChatEnd
from .completions_http import ResponseHead
from .front_door import Caller, FrontDoor
from .http_errors import json_text
from .http_stream import DONE_FRAME, data_frame
from .relay import Relay
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
    front: FrontDoor,
    request: ChatRequest,
    caller: Caller,
    head: ResponseHead,
    record: RequestRecord,
    relay: Relay[list[str]] | None = None,
) -> AsyncGenerator[str, None]:
    """`chat.completion.chunk` objects as JSON text, but for those that `relay` is given; the last one carries the
    usage. Raises ServingError."""
    chunks = _Chunks(request, record)
    deltas = None if relay is None else relay.through(chunks.of_the_only_choice)
    async with open_chat(front, request, caller, response_id=head.id, relay=deltas) as opened:
        chunks.begin(opened.prompt.prompt_ids)
        async for index, event in opened.events:
            for text in chunks.of(index, event):
                yield text
    if request.choices > 1:
        yield chunks.usage()


async def chat_frames(
    front: FrontDoor,
    request: ChatRequest,
    caller: Caller,
    head: ResponseHead,
    record: RequestRecord,
    relay: Relay[bytes] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to `[DONE]`, but for those that `relay` is given."""
    texts = None if relay is None else relay.through(_frames)
    async for chunk in chat_chunks(front, request, caller, head, record, texts):
        yield data_frame(chunk)
    yield DONE_FRAME


def _frames(texts: list[str]) -> bytes:
    return b"".join(map(data_frame, texts))


class _Chunks:
    """The parser's chunks of one answer as JSON: as they are, or with what only we know."""

    def __init__(self, request: ChatRequest, record: RequestRecord) -> None:
        self._request = request
        self._record = record
        self._usages: dict[int, Usage] = {}
        self._prompt_ids: Sequence[int] | None = None
        """For the first chunk, if it is to tell them."""
        self._untold_ids: defaultdict[int, list[int]] = defaultdict(list)
        """By choice, for its next chunk: an event whose text the parser holds back has none."""
        self._last: dict[str, Any] = {}

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = prompt_ids if self._request.return_token_ids else None

    def of_the_only_choice(self, delta: ChatDelta) -> list[str]:
        return self.of(0, delta)

    def of(self, index: int, event: ChatDelta | ChatEnd) -> list[str]:
        """Those of one event of choice `index`."""
        texts = [chunk.to_json() for chunk in event.chunks]
        if self._request.choices == 1 and not self._request.return_token_ids and isinstance(event, ChatDelta):
            return texts
        self._untold_ids[index] += [token.id for token in event.tokens]
        return [self._rewritten(json.loads(text), index, event) for text in texts]

    def usage(self) -> str:
        """The chunk after those of several choices."""
        return json_text(self._last | {"choices": [], "usage": _total(list(self._usages.values())).to_json()})

    def _rewritten(self, chunk: dict[str, Any], index: int, event: ChatDelta | ChatEnd) -> str:
        self._last = chunk
        told_ids = self._untold_ids.pop(index, [])
        if self._request.return_token_ids:
            for choice in chunk["choices"]:
                choice["token_ids"] = told_ids
            if self._prompt_ids is not None:
                chunk["prompt_token_ids"], self._prompt_ids = list(self._prompt_ids), None
        if isinstance(event, ChatEnd) and chunk.get("usage"):
            self._usages[index] = _usage_of(event)
            self._record.note_result(_total(list(self._usages.values())), event.route)
            chunk["usage"] = self._usages[index].to_json() if self._request.choices == 1 else None
        chunk["choices"] = [_choice_of(chunk, index)]
        return json_text(chunk)


def _choice_of(answer: dict[str, Any], index: int) -> dict[str, Any]:
    """The only choice of one parser's object, under its own index."""
    (choice,) = answer["choices"]
    return {**choice, "index": index}


def _usage_of(end: ChatEnd) -> Usage:
    return Usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens, end.reasoning_tokens)


def _total(usages: Sequence[Usage]) -> Usage:
    return total_usage((0, usage) for usage in usages)
