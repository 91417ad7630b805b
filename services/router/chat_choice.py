"""One choice of a conversation: a job's tokens through the released parser, which makes the chunks.

Tokens go in as ids, so that a model spelling `</think>` in plain letters closes nothing; the id that ends the request
does not go in at all, because the parser would take it for text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import deepseek_recipe as recipe

from whalepod.core.errors import InternalError
from whalepod.engine.interface import FinishReason, SampledToken
from whalepod.model.prompt import ChatPrompt

from .front_door import Caller, FrontDoor
from .job import Burst, Ending, Job, Progress, Route, Scores
from .relay import Relay
from .text_choice import TextScores, silent_enders

Chunk = recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent
"""What the parser makes of a burst: the chunks or events of the protocol that the request came in."""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one step added; the parser may hold text back, so there may be no chunk."""

    chunks: tuple[Chunk, ...]
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ChatEnd:
    """The last chunks, and what only we know: the parser's own counts leave out the id that ended the request."""

    chunks: tuple[Chunk, ...]
    tokens: tuple[SampledToken, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None
    """Ids before the one that ends the reasoning; None if the answer has none."""
    route: Route


async def stream_chat(
    front: FrontDoor,
    job: Job,
    caller: Caller,
    prompt: ChatPrompt,
    *,
    response_id: str,
    relay: Relay[ChatDelta] | None = None,
) -> AsyncGenerator[ChatDelta | TextScores | ChatEnd, None]:
    """Scores of the prompt if they were asked for, deltas, one end. A stop string stops the ranks at once. `relay` is
    given deltas as `Dispatcher.generate` says; with stop strings none, because one ends the stream.

    Raises what `Dispatcher.generate` raises.
    """
    language = front.language
    answer = _Answer(
        job,
        prompt,
        response_id=response_id,
        model=front.model.name,
        eos=language.eos_token_id,
        think_end=language.think_end_id,
    )
    item: Progress | None = None
    bursts = None if relay is None or prompt.parsing.stop_sequences else relay.through(answer.push)
    try:
        async with aclosing(front.run(job, caller, bursts)) as progress:
            async for item in progress:
                if isinstance(item, Scores):
                    yield TextScores(item.start, item.tokens)
                    continue
                if isinstance(item, Ending):
                    break
                delta = answer.push(item)
                if answer.finished:
                    break
                yield delta
        # The ranks have been told; only now is a client, who may be slow, given the last of it.
        assert item is not None, "a job yields at least its ending"
        yield answer.end(item)
    finally:
        answer.close()


class _Answer:
    """The parser of one choice and the count of what went into it."""

    def __init__(
        self, job: Job, prompt: ChatPrompt, *, response_id: str, model: str, eos: int, think_end: int | None
    ) -> None:
        self._job = job
        self._parser = prompt.parser(response_id=response_id, model=model)
        self._one_by_one = bool(prompt.parsing.stop_sequences)
        self._enders = silent_enders(job.sampling, eos_token_id=eos, include_stop=False)
        self._begun = False
        self._count = 0
        # The parser counts reasoning by encoding its text again, which is another number where bytes are no UTF-8.
        self._think_end = think_end
        self._reasoning = 0 if prompt.reasons_first else None
        self._reasons = prompt.reasons_first
        self._last = ChatDelta((), ())

    @property
    def finished(self) -> bool:
        """A stop string matched: the rest of the answer is nobody's."""
        return self._parser.finished

    def push(self, burst: Burst) -> ChatDelta:
        chunks = self._begin(burst)
        taken = 0
        # With stop strings token by token, so that the one that completed the match is known.
        for tokens in [(token,) for token in burst.tokens] if self._one_by_one else [burst.tokens]:
            spoken = [token for token in tokens if token.id not in self._enders]
            chunks += self._push(_tokens_chunk(spoken, self._job.sampling.logprobs)) if spoken else []
            taken += len(tokens)
            if self.finished:
                break
        self._count += taken
        self._count_reasoning(burst.tokens[:taken])
        delta = ChatDelta(tuple(chunks), burst.tokens[:taken])
        if self.finished:
            self._last = delta
        return delta

    def end(self, last: Progress) -> ChatEnd:
        chunks = [*self._last.chunks, *self._begin(last)]
        if isinstance(last, Ending) and not self.finished:
            length = last.reason is FinishReason.LENGTH
            reason = recipe.InferenceFinishReason.Length if length else recipe.InferenceFinishReason.Stop
            chunks += self._push(recipe.InferenceChunk.finish(reason))
        try:
            chunks += self._parser.finish()
        except RuntimeError as error:
            raise InternalError(f"the answer could not be parsed: {error}") from error
        return ChatEnd(
            chunks=tuple(chunks),
            tokens=self._last.tokens,
            prompt_tokens=len(self._job.prompt_ids),
            cached_tokens=last.cached_tokens,
            completion_tokens=self._count,
            reasoning_tokens=self._reasoning,
            route=last.route,
        )

    def close(self) -> None:
        self._parser.close()

    def _count_reasoning(self, tokens: Sequence[SampledToken]) -> None:
        for token in tokens:
            self._reasons = self._reasons and token.id != self._think_end
            if self._reasons and self._reasoning is not None and token.id not in self._enders:
                self._reasoning += 1

    def _begin(self, item: Progress) -> list[Chunk]:
        """The first chunk, with the role, comes with the first token and not before."""
        if self._begun:
            return []
        self._begun = True
        usage = recipe.PromptUsage(prompt_tokens=len(self._job.prompt_ids), prompt_cache_hit_tokens=item.cached_tokens)
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def _push(self, chunk: recipe.InferenceChunk) -> list[Chunk]:
        try:
            return self._parser.push(chunk)
        except RuntimeError as error:
            raise InternalError(f"the answer could not be parsed: {error}") from error


def _tokens_chunk(tokens: Sequence[SampledToken], logprobs: int | None) -> recipe.InferenceChunk:
    ids = [token.id for token in tokens]
    if logprobs is None:
        return recipe.InferenceChunk.tokens(ids)
    pairs = [(token.logprob or 0.0, list(zip(token.top_ids, token.top_logprobs, strict=True))) for token in tokens]
    return recipe.InferenceChunk.tokens(ids, pairs)
