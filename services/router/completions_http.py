"""`/v1/completions` over HTTP: the same choices as one JSON object, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from whalepod.engine.interface import SampledToken

from .completions import CompletionRequest, OpenCompletion, PreparedPrompt, open_completion
from .front_door import Caller, FrontDoor
from .http_errors import json_text
from .http_stream import DONE_FRAME, data_frame
from .language import Language
from .relay import Relay
from .request_record import RequestRecord
from .text_choice import TextDelta, TextEnd
from .usage import Usage, total_usage

GOES_ON: dict[str, None] = {"finish_reason": None, "stop_reason": None}
"""In every chunk but the last."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of an answer repeats. `created` in Unix seconds."""

    id: str
    created: int
    model: str

    def completion(self, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def around_choice(self, **more: object) -> tuple[str, str]:
        """The JSON of a completion of one choice, before that and after: encoded once for a stream's many chunks."""
        before, _, after = json_text(self.completion([{}], **more)).rpartition("[{}]")
        return before + "[", "]" + after


async def completion_answer(
    front: FrontDoor, request: CompletionRequest, caller: Caller, head: ResponseHead, record: RequestRecord
) -> dict[str, Any]:
    """All choices when all are done. Raises ServingError."""
    async with open_completion(front, request, caller) as opened:
        choices = [
            _ChoiceJson(front.language, request, _prompt_of(opened, request, index)) for index in range(request.choices)
        ]
        parts: list[list[dict[str, Any]]] = [[] for _ in choices]
        ends: dict[int, TextEnd] = {}
        async for index, event in opened.events:
            if isinstance(event, TextEnd):
                ends[index] = event
            else:
                parts[index].append(choices[index].delta(event))
        usage = _total(ends, request)
        record.note_result(usage, ends[0].route)
        whole = [{"index": index} | choices[index].whole(parts[index], ends[index]) for index in range(request.choices)]
        return head.completion(whole, usage=usage.to_json())


async def completion_frames(
    front: FrontDoor,
    request: CompletionRequest,
    caller: Caller,
    head: ResponseHead,
    record: RequestRecord,
    relay: Relay[bytes] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events up to `[DONE]`, but for those that `relay` is given. Raises ServingError; what was yielded
    before stands."""
    around = head.around_choice(**({"usage": None} if request.include_usage else {}))
    choices: list[_ChoiceFrames] = []

    def only_choice(delta: TextDelta) -> bytes:
        return choices[0].delta(delta)

    deltas = None if relay is None else relay.through(only_choice)
    async with open_completion(front, request, caller, deltas) as opened:
        choices += [
            _ChoiceFrames(index, _ChoiceJson(front.language, request, _prompt_of(opened, request, index)), around)
            for index in range(request.choices)
        ]
        ends: dict[int, TextEnd] = {}
        async for index, event in opened.events:
            if isinstance(event, TextEnd):
                ends[index] = event
                yield choices[index].end(event)
            elif frame := choices[index].delta(event):
                yield frame
        usage = _total(ends, request)
        record.note_result(usage, ends[0].route)
    if request.include_usage:
        yield data_frame(head.completion([], usage=usage.to_json()))
    yield DONE_FRAME


class _ChoiceFrames:
    """One choice's chunks as server-sent events. Most differ in their text alone: all else of them is encoded once."""

    def __init__(self, index: int, choice: _ChoiceJson, around: tuple[str, str]) -> None:
        self._index = index
        self._choice = choice
        self._around = around
        before, _, after = self._frame({"text": "?", "logprobs": None} | GOES_ON).rpartition(b'"?"')
        self._before_text, self._after_text = before, after

    def delta(self, delta: TextDelta) -> bytes:
        """Empty: there is nothing to say."""
        if self._choice.only_text_follows:
            if not delta.text:
                return b""
            return b"%b%b%b" % (self._before_text, json_text(delta.text).encode("utf-8", "replace"), self._after_text)
        chunk = self._choice.delta(delta)
        return self._frame(chunk) if chunk["text"] or self._choice.speaks(delta) else b""

    def end(self, end: TextEnd) -> bytes:
        return self._frame(self._choice.end(end))

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        before, after = self._around
        return data_frame(before + json_text({"index": self._index} | chunk) + after)


@dataclass(slots=True)
class _ChoiceJson:
    """One choice's JSON, chunk by chunk. The first chunk carries the echo and the prompt's ids."""

    language: Language
    request: CompletionRequest
    prompt: PreparedPrompt
    only_text_follows: bool = field(default=False, init=False)
    """Chunks but the first and the last hold their text and nothing else."""
    _begun: bool = field(default=False, init=False)
    _offset: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._offset = 0 if self._scored else len(self.prompt.echo)

    @property
    def _scored(self) -> bool:
        """The echo comes with its log-probabilities."""
        return self.request.echo and self.request.sampling.logprobs is not None

    def speaks(self, delta: TextDelta) -> bool:
        """Whether a delta without text has something to say."""
        return bool(delta.tokens) and (self.request.return_token_ids or self.request.sampling.logprobs is not None)

    def delta(self, delta: TextDelta) -> dict[str, Any]:
        return self._chunk(delta.text, delta.tokens) | GOES_ON

    def end(self, end: TextEnd) -> dict[str, Any]:
        return self._chunk("", ()) | {"finish_reason": end.reason.value, "stop_reason": end.stop_reason}

    def whole(self, parts: Sequence[dict[str, Any]], end: TextEnd) -> dict[str, Any]:
        """The chunks `parts` and the end as one choice."""
        chunks = [*parts, self.end(end)]
        choice = chunks[-1] | {"text": "".join(chunk["text"] for chunk in chunks)}
        logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
        if logprobs:
            choice["logprobs"] = {key: [item for part in logprobs for item in part[key]] for key in logprobs[0]}
        if self.request.prompt_logprobs:
            choice["prompt_logprobs"] = self.prompt.book.to_json(self.prompt.ids, self.language)
        if self.request.return_token_ids:
            choice["token_ids"] = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
            choice["prompt_token_ids"] = list(self.prompt.ids)
        return choice

    def _chunk(self, text: str, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        first, self._begun = not self._begun, True
        self.only_text_follows = not self.request.return_token_ids and self.request.sampling.logprobs is None
        chunk: dict[str, Any] = {"text": self.prompt.echo + text if first else text, "logprobs": None}
        scored = self._echoed() if first and self._scored else []
        if self.request.sampling.logprobs is not None and (scored or tokens):
            chunk["logprobs"] = self._logprobs([*scored, *tokens])
        if self.request.return_token_ids:
            chunk["token_ids"] = [token.id for token in tokens]
            if first:
                chunk["prompt_token_ids"] = list(self.prompt.ids)
        return chunk

    def _echoed(self) -> list[SampledToken]:
        """The prompt's tokens; the first has no log-probability."""
        ids, scores = self.prompt.ids, self.prompt.book.scores
        return [score or SampledToken(token_id) for token_id, score in zip(ids, scores, strict=True)]

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, list[Any]]:
        texts = [self.language.token_text(token.id) for token in tokens]
        special = self.language.tokenizer.special_ids if self.request.text.skip_special_tokens else frozenset[int]()
        offsets: list[int] = []
        for text, token_id in zip(texts, (token.id for token in tokens), strict=True):
            offsets.append(self._offset)
            self._offset += 0 if token_id in special else len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: SampledToken) -> dict[str, float | None] | None:
        """The best alternatives by text, and always the token itself."""
        if token.logprob is None:
            return None
        top: dict[str, float | None] = {self.language.token_text(token.id): token.logprob}
        for token_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True):
            top.setdefault(self.language.token_text(token_id), logprob)
        return top


def _prompt_of(opened: OpenCompletion, request: CompletionRequest, index: int) -> PreparedPrompt:
    return opened.prompts[index // request.choices_each]


def _total(ends: dict[int, TextEnd], request: CompletionRequest) -> Usage:
    return total_usage(
        (index // request.choices_each, Usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens))
        for index, end in sorted(ends.items())
    )
