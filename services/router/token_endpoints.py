"""`/tokenize` and `/detokenize`: what a text or a conversation looks like to the model, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalepod.core.errors import InvalidFieldError

from .body_models import DetokenizeBody, TokenizeBody, parse_body
from .front_door import FrontDoor
from .prompts import TextPrompt, parse_ids


async def tokenize(front: FrontDoor, body: Mapping[str, Any], *, body_chars: int) -> dict[str, Any]:
    """Raises InvalidFieldError (neither or both of `prompt` and `messages`), ModelNotFoundError, ContextLengthError."""
    fields = parse_body(TokenizeBody, body)
    front.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidFieldError("prompt", "give either prompt or messages")
    if fields.prompt is not None:
        prompt = TextPrompt(fields.prompt)
        ids = list(await front.language.prompt_ids(prompt, context_tokens=front.context_tokens_max))
        ids = ids if fields.add_special_tokens else ids[1:]
    else:
        chat = {**body, "model": front.model.name}
        asked = await front.language.chat_prompt(chat, context_tokens=front.context_tokens_max, chars=body_chars)
        ids = list(asked.prompt_ids)
    return {"count": len(ids), "max_model_len": front.context_tokens_max, "tokens": ids}


async def detokenize(front: FrontDoor, body: Mapping[str, Any]) -> dict[str, Any]:
    """Raises InvalidFieldError, ModelNotFoundError. Special tokens are spelled out."""
    fields = parse_body(DetokenizeBody, body)
    front.check_model(fields.model)
    if not isinstance(fields.tokens, list):
        raise InvalidFieldError("tokens", "tokens must be a list of token ids")
    if not fields.tokens:
        return {"prompt": ""}
    prompt = parse_ids(fields.tokens, vocab_size=front.language.vocab_size, field="tokens")
    return {"prompt": await front.language.text_of(prompt.ids, skip_special_tokens=False)}
