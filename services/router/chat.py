"""A conversation, in whichever protocol it comes: from its body to the choices it asks for, as they are generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from whalepod.core.clock import Deadline
from whalepod.core.errors import InvalidFieldError
from whalepod.core.tracing import span
from whalepod.engine.interface import Fidelity
from whalepod.model.prompt import ChatPrompt
from whalepod.model.protocols import CHAT, MESSAGES, RESPONSES, Protocol

from .answer_format import AnswerFormat, chat_format
from .body_models import (
    NOT_DONE,
    PromptScoresBody,
    SamplingBody,
    SeedBody,
    ServingBody,
    UserBody,
    parse_body,
    refuse_fields,
)
from .chat_choice import ChatDelta, ChatEnd, stream_chat
from .front_door import Caller, FrontDoor
from .merging import merge
from .prompt_scores import ScoreBook, after_scores
from .relay import Relay

_REFUSED: Mapping[str, str] = {
    **NOT_DONE,
    "include_stop_str_in_output": "the answer of a conversation ends before a stop string",
}
_KEEPS_NOTHING = "this server keeps no conversations; send the earlier turns again, their prefix is cached"
REFUSED: Mapping[str, Mapping[str, str]] = {
    CHAT.name: {
        **_REFUSED,
        "functions": "declare tools instead",
        "function_call": "declare tools instead",
        "audio": "this model writes text",
    },
    RESPONSES.name: {
        **_REFUSED,
        "previous_response_id": _KEEPS_NOTHING,
        "conversation": _KEEPS_NOTHING,
        "prompt": "this server keeps no prompts",
        "background": "an answer lives as long as its connection",
    },
    MESSAGES.name: {
        **_REFUSED,
        "container": "this server runs no code",
        "mcp_servers": "this server calls no other",
        "context_management": "this server keeps no conversations",
    },
}
"""By protocol: what a body may not set, and why."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked body; the conversation in it is checked when it is rendered."""

    body: Mapping[str, Any]
    body_chars: int
    sampling: SamplingBody
    choices: int
    fidelity: Fidelity
    priority: int
    cache_salt: str | None
    stream: bool
    return_token_ids: bool
    protocol: Protocol = CHAT
    user: str | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    """Where the prompt layer reads none."""


@dataclass(frozen=True, slots=True)
class OpenChat:
    prompt: ChatPrompt
    events: AsyncGenerator[tuple[int, ChatDelta | ChatEnd], None]
    book: ScoreBook
    """The prompt's scores, if it is scored."""


def parse_chat(body: Mapping[str, Any], front: FrontDoor, *, body_chars: int, protocol: Protocol = CHAT) -> ChatRequest:
    """`body_chars`: about how long the body is. Raises RequestError (bad fields are named), ModelNotFoundError."""
    serving = parse_body(ServingBody, body)
    front.check_model(serving.model)
    refuse_fields(body, REFUSED[protocol.name])
    if protocol is not CHAT and serving.n != 1:
        raise InvalidFieldError("n", "n must be 1: this protocol has one answer")
    return ChatRequest(
        body=_known_roles({**body, "model": front.model.name}),
        body_chars=body_chars,
        sampling=parse_body(SamplingBody, body),
        choices=serving.n,
        fidelity=serving.fidelity_or(front.model.fidelity_default),
        priority=serving.priority,
        cache_salt=serving.cache_salt,
        stream=serving.stream,
        return_token_ids=serving.return_token_ids,
        protocol=protocol,
        prompt_logprobs=_prompt_logprobs(body, stream=serving.stream, protocol=protocol),
        user=parse_body(UserBody, {"user": protocol.user(body)}).user,
        seed=None if protocol is CHAT else parse_body(SeedBody, body).seed,
    )


def _prompt_logprobs(body: Mapping[str, Any], *, stream: bool, protocol: Protocol) -> int | None:
    """Raises InvalidFieldError where no answer has a place for them."""
    wanted = parse_body(PromptScoresBody, body).prompt_logprobs
    if wanted is not None and (stream or protocol is not CHAT):
        raise InvalidFieldError(
            "prompt_logprobs", "prompt_logprobs are for whole chat completions: they are not streamed"
        )
    return wanted


@asynccontextmanager
async def open_chat(
    front: FrontDoor,
    request: ChatRequest,
    caller: Caller,
    *,
    response_id: str,
    relay: Relay[ChatDelta] | None = None,
) -> AsyncGenerator[OpenChat, None]:
    """Admitted, rendered, tokenized, and ready to be read. Leaving it stops whatever still runs. `relay`: for deltas
    of the only choice.

    Raises QueueFullError, UnavailableError, RequestError before any rank is touched.
    """
    async with front.admitted(caller, choices=request.choices, priority=request.priority):
        with span("tokenize", caller.traceparent):
            prompt = await chat_prompt(front, request, deadline=caller.deadline)
        answer_format = await _checked_format(front, request, prompt, caller)
        sampling = request.sampling.to_params(
            vocab_size=front.language.vocab_size,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            seed=request.seed if prompt.seed is None else prompt.seed,
            logprobs=prompt.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            max_tokens=prompt.max_tokens,
        )
        if answer_format is not None:
            starts_after = front.language.think_end_id if prompt.reasons_first else None
            sampling = answer_format.applied_to(sampling, starts_after=starts_after)
        jobs = await front.jobs(
            caller.on_behalf_of(request.user),
            prompt.prompt_ids,
            sampling,
            fidelity=request.fidelity,
            priority=request.priority,
            cache_salt=request.cache_salt,
            choices=request.choices,
            field=request.protocol.conversation_field,
            images=prompt.images,
        )
        relay = relay if len(jobs) == 1 else None
        streams = [stream_chat(front, job, caller, prompt, response_id=response_id, relay=relay) for job in jobs]
        book = ScoreBook(len(prompt.prompt_ids) if request.prompt_logprobs is not None else 0)
        merged = after_scores(merge(streams), [book], choices_each=request.choices)
        async with aclosing(merged) as events:
            yield OpenChat(prompt, events, book)


async def chat_prompt(front: FrontDoor, request: ChatRequest, *, deadline: Deadline | None = None) -> ChatPrompt:
    """Rendered and tokenized, its images ready. Raises RequestError, DeadlineError."""
    return await front.language.chat_prompt(
        request.body,
        context_tokens=front.context_tokens_max,
        chars=request.body_chars,
        protocol=request.protocol,
        deadline=deadline,
    )


def _known_roles(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's newer name for the system's messages, in the prompt layer's word."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    renamed = [
        {**message, "role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
        for message in messages
    ]
    return {**body, "messages": renamed}


async def _checked_format(
    front: FrontDoor, request: ChatRequest, prompt: ChatPrompt, caller: Caller
) -> AnswerFormat | None:
    """Raises InvalidFieldError if it cannot be followed."""
    answer_format = chat_format(prompt.constraint, request.body, request.protocol)
    if answer_format is not None:
        await front.language.check_format(answer_format, deadline=caller.deadline)
    return answer_format
