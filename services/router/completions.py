"""`/v1/completions`: from its body to the choices it asks for, as they are generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from whalepod.core.errors import InvalidFieldError
from whalepod.core.tracing import span
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams

from .answer_format import AnswerFormat, only_one, response_format, vllm_format
from .body_models import (
    CHOICES_MAX,
    NOT_DONE,
    CompletionBody,
    SamplingBody,
    ServingBody,
    UserBody,
    parse_body,
    refuse_fields,
)
from .front_door import Caller, FrontDoor
from .merging import merge
from .prompt_scores import ScoreBook, after_scores
from .prompts import Prompt, TextPrompt, parse_prompts
from .relay import Relay
from .text_choice import TextDelta, TextEnd, TextEvent, TextOptions, TextScores, stream_text

REFUSED: Mapping[str, str] = {**NOT_DONE, "suffix": "this model completes text at its end only"}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked body. `max_tokens` 0: nothing is generated."""

    prompts: Sequence[Prompt]
    choices_each: int
    sampling: SamplingParams
    answer_format: AnswerFormat | None
    max_tokens: int
    text: TextOptions
    fidelity: Fidelity
    priority: int
    cache_salt: str | None
    user: str | None
    echo: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    prompt_logprobs: bool
    """Whether the prompt's log-probabilities are told apart, as vLLM does."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.choices_each


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """`echo` is the prompt's text if the answer is to begin with it; `book` holds its scores if it is scored."""

    ids: Sequence[int]
    echo: str
    book: ScoreBook


@dataclass(frozen=True, slots=True)
class OpenCompletion:
    """Choice i belongs to prompt `i // choices_each`."""

    prompts: Sequence[PreparedPrompt]
    events: AsyncGenerator[tuple[int, TextDelta | TextEnd], None]


def parse_completion(body: Mapping[str, Any], front: FrontDoor) -> CompletionRequest:
    """Raises RequestError (bad fields are named), ModelNotFoundError."""
    serving, fields = parse_body(ServingBody, body), parse_body(CompletionBody, body)
    front.check_model(serving.model)
    refuse_fields(body, REFUSED)
    if body.get("best_of") not in (None, serving.n):
        raise InvalidFieldError("best_of", "best_of is not supported: every choice that is generated is returned")
    if body.get("add_special_tokens") not in (None, True):
        raise InvalidFieldError(
            "add_special_tokens", "add_special_tokens must be true: send token ids for a prompt without"
        )
    if fields.prompt_logprobs is not None and serving.stream:
        raise InvalidFieldError("prompt_logprobs", "prompt_logprobs are not streamed: ask for echo with logprobs")
    vocab_size = front.language.vocab_size
    prompts = parse_prompts(fields.prompt, vocab_size=vocab_size)
    if len(prompts) * serving.n > CHOICES_MAX:
        raise InvalidFieldError("n", f"prompts times n may be at most {CHOICES_MAX}, not {len(prompts) * serving.n}")
    sampling = parse_body(SamplingBody, body).to_params(
        vocab_size=vocab_size,
        temperature=fields.temperature,
        top_p=fields.top_p,
        seed=fields.seed,
        logprobs=fields.logprobs,
        prompt_logprobs=scores_wanted(fields.prompt_logprobs, fields.logprobs if fields.echo else None),
        max_tokens=max(1, fields.max_tokens),
    )
    answer_format = only_one(response_format(body), vllm_format(body))
    return CompletionRequest(
        prompts=prompts,
        choices_each=serving.n,
        sampling=sampling if answer_format is None else answer_format.applied_to(sampling),
        answer_format=answer_format,
        max_tokens=fields.max_tokens,
        text=TextOptions(fields.stop_strings, fields.include_stop_str_in_output, fields.skip_special_tokens),
        fidelity=serving.fidelity_or(front.model.fidelity_default),
        priority=serving.priority,
        cache_salt=serving.cache_salt,
        user=parse_body(UserBody, body).user,
        echo=fields.echo,
        stream=serving.stream,
        include_usage=serving.stream_options.include_usage,
        return_token_ids=serving.return_token_ids,
        prompt_logprobs=fields.prompt_logprobs is not None,
    )


def scores_wanted(*asked: int | None) -> int | None:
    """How many of the best tokens to score beside each of the prompt's; None: the prompt is not scored."""
    return max((count for count in asked if count is not None), default=None)


@asynccontextmanager
async def open_completion(
    front: FrontDoor, request: CompletionRequest, caller: Caller, relay: Relay[TextDelta] | None = None
) -> AsyncGenerator[OpenCompletion, None]:
    """Admitted, tokenized, and ready to be read. Leaving it stops whatever still runs. `relay`: for deltas of the only
    choice.

    Raises QueueFullError, UnavailableError, RequestError before any rank is touched.
    """
    async with front.admitted(caller, choices=request.choices, priority=request.priority):
        if request.answer_format is not None:
            await front.language.check_format(request.answer_format, deadline=caller.deadline)
        with span("tokenize", caller.traceparent, prompts=len(request.prompts)):
            prompts = [await _prepare(front, request, prompt) for prompt in request.prompts]
        streams: list[AsyncGenerator[TextEvent, None]] = []
        for prompt in prompts:
            streams += await _choices_of(front, request, prompt, caller, relay if request.choices == 1 else None)
        books = [prompt.book for prompt in prompts]
        merged = after_scores(merge(streams), books, choices_each=request.choices_each)
        async with aclosing(merged) as events:
            yield OpenCompletion(prompts, events)


async def _prepare(front: FrontDoor, request: CompletionRequest, prompt: Prompt) -> PreparedPrompt:
    ids = await front.language.prompt_ids(prompt, context_tokens=front.context_tokens_max)
    front.check_length(len(ids), request.max_tokens)
    echo = ""
    if request.echo:
        is_text = isinstance(prompt, TextPrompt)
        echo = prompt.text if is_text else await front.language.text_of(ids, skip_special_tokens=True)
    scored = request.sampling.prompt_logprobs is not None
    return PreparedPrompt(ids, echo, ScoreBook(len(ids) if scored else 0))


async def _choices_of(
    front: FrontDoor,
    request: CompletionRequest,
    prompt: PreparedPrompt,
    caller: Caller,
    relay: Relay[TextDelta] | None,
) -> list[AsyncGenerator[TextEvent, None]]:
    if request.max_tokens == 0 and prompt.book.whole:
        front.check_fidelity(request.fidelity)
        return [_nothing(len(prompt.ids)) for _ in range(request.choices_each)]
    jobs = await front.jobs(
        caller.on_behalf_of(request.user),
        prompt.ids,
        request.sampling,
        fidelity=request.fidelity,
        priority=request.priority,
        cache_salt=request.cache_salt,
        choices=request.choices_each,
    )
    if request.max_tokens == 0:
        return [_scores_of(stream_text(front, job, caller, request.text)) for job in jobs]
    return [stream_text(front, job, caller, request.text, relay) for job in jobs]


async def _nothing(prompt_tokens: int) -> AsyncGenerator[TextEvent, None]:
    """The completion of `max_tokens` 0: legal, empty, and no work for a rank."""
    yield TextEnd(FinishReason.LENGTH, None, prompt_tokens, cached_tokens=0, completion_tokens=0, route=None)


async def _scores_of(stream: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[TextEvent, None]:
    """The same for a prompt that is scored: a rank draws one token, which nobody asked for."""
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, TextScores):
                yield event
            elif isinstance(event, TextEnd):
                yield replace(event, reason=FinishReason.LENGTH, stop_reason=None, completion_tokens=0)
