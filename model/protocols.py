"""The three forms in which a conversation may be asked for, as far as the released prompt layer leaves them to us.

OpenAI Chat Completions │ OpenAI Responses │ Anthropic Messages ──▶ fields for the layer ──▶ one conversation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from whalepod.core.errors import InvalidFieldError

_MESSAGES: Mapping[str, Any] = {"messages": [{"role": "user", "content": "."}]}


@dataclass(frozen=True, slots=True)
class Protocol:
    """How one form differs from the others. `request` and `response` are classes of the prompt layer."""

    name: str
    request: Any
    response: Any
    conversation_field: str
    """Where the conversation stands in a body."""
    harmless: Mapping[str, Any]
    """The least that the layer converts."""
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From a body without unset fields to what the layer is given. Raises InvalidFieldError."""
    user: Callable[[Mapping[str, Any]], object] = lambda body: body.get("user")
    """Whom the client answers for."""


def set_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Null is unset."""
    return {name: value for name, value in body.items() if value is not None}


def _chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in body.items() if name != "n"}
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    return fields


def _responses_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities may be asked for by their place in the answer."""
    fields = dict(body)
    _refuse_parts(body.get("input"), "input", ("input_file", "item_reference", "input_audio"))
    include = body.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        fields.setdefault("top_logprobs", 0)
    return fields


def _messages_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Who must call a tool cannot think first, and Anthropic's clients think only when they say so."""
    _refuse_parts(body.get("messages"), "messages", ("document",))
    fields = dict(body)
    if forced_kind(body) in ("any", "tool"):
        fields.setdefault("thinking", {"type": "disabled"})
    return fields


def forced_kind(body: Mapping[str, Any]) -> object:
    """The type of an object `tool_choice`."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, Mapping) else None


def messages_schema(body: Mapping[str, Any]) -> Any:  # noqa: ANN401  JSON
    """The JSON schema that a Messages request wants its text to follow; None: it wants none.

    Raises InvalidFieldError on any other form.
    """
    config = body.get("output_config")
    asked = config.get("format") if isinstance(config, Mapping) else None
    field = "output_config" if asked is not None else "output_format"
    asked = body.get("output_format") if asked is None else asked
    if asked is None:
        return None
    if not isinstance(asked, Mapping) or asked.get("type") != "json_schema" or "schema" not in asked:
        raise InvalidFieldError(field, f"{field}: the format must be of type json_schema, with a schema")
    return asked["schema"]


def with_messages_wishes(
    body: Mapping[str, Any], request: recipe.ConversationRequest
) -> tuple[recipe.Conversation, recipe.ParsingOptions]:
    """What the layer leaves out of a Messages request: `any` tool, and a schema for the text.

    Raises InvalidFieldError on a tool that must be called after thinking.
    """
    conversation, parsing = request.conversation, request.parsing_options
    must_call = forced_kind(body) == "any" and bool(conversation.tools)
    schema = messages_schema(body)
    if must_call and conversation.thinking_mode:
        raise InvalidFieldError("tool_choice", "tool_choice: a tool can only be demanded with thinking disabled")
    if not must_call and schema is None:
        return conversation, parsing
    rebuilt = recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice="required" if must_call else conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=schema,
    )
    parsing.starts_in_tool_calls = parsing.starts_in_tool_calls or must_call
    return rebuilt, parsing


def _refuse_parts(messages: object, field: str, kinds: Sequence[str]) -> None:
    """The layer puts a note in the place of what it cannot read; the client is better told."""
    for part in _parts(messages):
        if part.get("type") in kinds:
            raise InvalidFieldError(field, f"{field}: this server reads no {part['type']}; send its text")


def _parts(messages: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, Mapping):
                yield message
                yield from _parts(message.get("content"))


def _messages_user(body: Mapping[str, Any]) -> object:
    metadata = body.get("metadata")
    return metadata.get("user_id") if isinstance(metadata, Mapping) else None


CHAT = Protocol(
    "chat", recipe.ChatCompletionRequest, recipe.ChatCompletionResponse, "messages", _MESSAGES, _chat_fields
)
RESPONSES = Protocol(
    "responses", recipe.ResponsesRequest, recipe.ResponsesResponse, "input", {"input": "."}, _responses_fields
)
MESSAGES = Protocol(
    "messages",
    recipe.MessagesRequest,
    recipe.MessagesResponse,
    "messages",
    {**_MESSAGES, "max_tokens": 1},
    _messages_fields,
    _messages_user,
)
