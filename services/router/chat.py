"""`/v1/chat/completions`: from its body to the choices it asks for, as they are generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from whalepod.engine.interface import Fidelity
from whalepod.model.prompt import ChatPrompt

from .answer_format import AnswerFormat, chat_format
from .body_models import SamplingBody, ServingBody, parse_body, refuse_fields
from .chat_choice import ChatDelta, ChatEnd, stream_chat
from .front_door import Caller, FrontDoor
from .merging import merge

REFUSED: Mapping[str, str] = {
    "functions": "declare tools instead",
    "function_call": "declare tools instead",
    "include_stop_str_in_output": "the answer of a conversation ends before a stop string",
    "prompt_logprobs": "log-probabilities of prompts are not computed yet",
    "use_beam_search": "tokens are sampled",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked body; the conversation in it is checked when it is rendered."""

    body: Mapping[str, Any]
    body_chars: int
    sampling: SamplingBody
    choices: int
    fidelity: Fidelity
    cache_salt: str | None
    stream: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class OpenChat:
    prompt: ChatPrompt
    events: AsyncGenerator[tuple[int, ChatDelta | ChatEnd], None]


def parse_chat(body: Mapping[str, Any], front: FrontDoor, *, body_chars: int) -> ChatRequest:
    """`body_chars`: about how long the body is. Raises RequestError (bad fields are named), ModelNotFoundError."""
    serving = parse_body(ServingBody, body)
    front.check_model(serving.model)
    refuse_fields(body, REFUSED)
    return ChatRequest(
        body={**body, "model": front.model.name, "messages": _known_roles(body.get("messages"))},
        body_chars=body_chars,
        sampling=parse_body(SamplingBody, body),
        choices=serving.n,
        fidelity=serving.fidelity_or(front.model.fidelity_default),
        cache_salt=serving.cache_salt,
        stream=serving.stream,
        return_token_ids=serving.return_token_ids,
    )


@asynccontextmanager
async def open_chat(
    front: FrontDoor, request: ChatRequest, caller: Caller, *, response_id: str
) -> AsyncGenerator[OpenChat, None]:
    """Admitted, rendered, tokenized, and ready to be read. Leaving it stops whatever still runs.

    Raises QueueFullError, UnavailableError, RequestError before any rank is touched.
    """
    async with front.admitted(caller, choices=request.choices):
        prompt = await front.language.chat_prompt(
            request.body, context_tokens=front.context_tokens_max, chars=request.body_chars
        )
        answer_format = await _checked_format(front, request, prompt, caller)
        sampling = request.sampling.to_params(
            vocab_size=front.language.vocab_size,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            seed=prompt.seed,
            logprobs=prompt.logprobs,
            max_tokens=prompt.max_tokens,
        )
        if answer_format is not None:
            starts_after = front.language.think_end_id if prompt.reasons_first else None
            sampling = answer_format.applied_to(sampling, starts_after=starts_after)
        jobs = await front.jobs(
            caller,
            prompt.prompt_ids,
            sampling,
            fidelity=request.fidelity,
            cache_salt=request.cache_salt,
            choices=request.choices,
            field="messages",
        )
        streams = [stream_chat(front, job, caller, prompt, response_id=response_id) for job in jobs]
        async with aclosing(merge(streams)) as events:
            yield OpenChat(prompt, events)


def _known_roles(messages: object) -> object:
    """OpenAI's newer name for the system's messages, in the prompt layer's word."""
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "role": "system"} if isinstance(message, dict) and message.get("role") == "developer" else message
        for message in messages
    ]


async def _checked_format(
    front: FrontDoor, request: ChatRequest, prompt: ChatPrompt, caller: Caller
) -> AnswerFormat | None:
    """Raises InvalidFieldError if it cannot be followed."""
    answer_format = chat_format(prompt.constraint, request.body)
    if answer_format is not None:
        await front.language.check_format(answer_format, deadline=caller.deadline)
    return answer_format
