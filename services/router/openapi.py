"""The description of the HTTP API, made from the models that read its bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .body_models import CompletionBody, DetokenizeBody, SamplingBody, ServingBody, TokenizeBody
from .purging import PurgeBody
from .workers import WorkerBody

BODIES: dict[str, tuple[str, tuple[type[BaseModel], ...]]] = {
    "/v1/completions": ("Complete a text or token ids.", (CompletionBody, SamplingBody, ServingBody)),
    "/v1/chat/completions": ("Answer in a conversation.", (SamplingBody, ServingBody)),
    "/v1/responses": ("Answer an input, as OpenAI's Responses.", (SamplingBody, ServingBody)),
    "/v1/messages": ("Answer in a conversation, as Anthropic's Messages.", (SamplingBody, ServingBody)),
    "/v1/messages/count_tokens": ("How long a conversation is for the model.", ()),
    "/tokenize": ("Token ids of a text or of a conversation.", (TokenizeBody,)),
    "/detokenize": ("The text of token ids.", (DetokenizeBody,)),
    "/workers": ("Give a rank new work again, or use the one at an address.", (WorkerBody,)),
    "/purge": ("Put what a tenant has stored out of reach.", (PurgeBody,)),
}
READS: dict[str, str] = {
    "/v1/models": "The served model.",
    "/livez": "Whether the process is alive.",
    "/readyz": "Whether it can serve: 503 names the pool that is empty.",
    "/health_generate": "Whether the cluster really generates a token.",
    "/version": "The version.",
    "/workers": "The usable ranks.",
    "/metrics": "Prometheus metrics.",
    "/dashboard": "A page for operators: ranks, requests and rates, live.",
}
CHAT_FIELDS = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "max_completion_tokens": {"type": "integer"},
        "temperature": {"type": "number"},
        "top_p": {"type": "number"},
        "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer"},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {},
        "thinking": {"type": "object"},
        "reasoning_effort": {"type": "string"},
        "chat_template_kwargs": {"type": "object"},
    },
}
RESPONSES_FIELDS = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "instructions": {"type": "string"},
        "max_output_tokens": {"type": "integer"},
        "reasoning": {"type": "object"},
        "temperature": {"type": "number"},
        "text": {"type": "object"},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {},
        "top_logprobs": {"type": "integer"},
        "top_p": {"type": "number"},
    },
}
MESSAGES_FIELDS = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "max_tokens": {"type": "integer"},
        "output_config": {"type": "object"},
        "stop_sequences": {"type": "array", "items": {"type": "string"}},
        "system": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "temperature": {"type": "number"},
        "thinking": {"type": "object"},
        "tools": {"type": "array", "items": {"type": "object"}},
        "tool_choice": {"type": "object"},
        "top_p": {"type": "number"},
    },
}
CONVERSATIONS = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": MESSAGES_FIELDS,
}
"""Fields that the prompt layer reads, and checks, itself."""


def openapi_document(*, version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in READS.items()}
    paths["/workers/{rank}"] = {"delete": _operation("Give a rank no new work.")}
    for path, (text, models) in BODIES.items():
        schemas = [model.model_json_schema(ref_template="#/components/schemas/{model}") for model in models]
        if path in CONVERSATIONS:
            schemas.append(CONVERSATIONS[path])
        body = {"required": True, "content": {"application/json": {"schema": {"allOf": schemas}}}}
        paths[path] = paths.get(path, {}) | {"post": _operation(text) | {"requestBody": body}}
    definitions: dict[str, Any] = {}
    for operations in paths.values():
        for operation in operations.values():
            _take_definitions(operation, definitions)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Whalepod", "version": version},
        "paths": paths,
        "components": {"schemas": definitions},
    }


def _operation(text: str) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": {"description": "The answer."}}}


def _take_definitions(operation: dict[str, Any], definitions: dict[str, Any]) -> None:
    body = operation.get("requestBody")
    if body is not None:
        for schema in body["content"]["application/json"]["schema"]["allOf"]:
            definitions.update(schema.pop("$defs", {}))
