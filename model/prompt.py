"""From a request's text to token ids, and the parser for what comes back: by the released prompt layer.

    body ──▶ PromptEncoder.chat ──▶ ChatPrompt(prompt_ids, max_tokens, …) ──▶ engine
                                        └─▶ parser(…) ◀── token ids ── engine

Everything here is CPU work without shared mutable state: call it from a pool of threads, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import deepseek_recipe as recipe

from whalepod.core.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
)

from .config import ModelConfig
from .special_tokens import recipe_special_tokens
from .tokenizer import Tokenizer

_NEEDED = (
    recipe.SpecialToken.Bos,
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.System,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.ThinkingEnd,
    recipe.SpecialToken.Dsml,
)
"""Special tokens without which no text conversation can be encoded or parsed."""

_REFUSALS = (recipe.ConversionError, ValueError, TypeError, OverflowError)
"""What the prompt layer raises for a body it cannot take. OverflowError: an integer of more than 64 bits, anywhere."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A converted `/v1/chat/completions` request. Values are resolved by the released rules: thinking forces the
    temperature to 1, for example. Fields the prompt layer does not know (`top_k`, `min_p`, `n`, …) are not in here."""

    prompt_ids: Sequence[int]
    max_tokens: int
    stream: bool
    temperature: float
    top_p: float
    seed: int | None
    logprobs: int | None
    """None: none; 0: the sampled token's; k: and the k best."""
    constraint: tuple[str, str] | None
    """(kind, schema) that the answer was asked to obey; enforcing it is the engine's work."""
    request: recipe.ConversationRequest
    tokenizer: recipe.Tokenizer

    @property
    def reasons_first(self) -> bool:
        """The answer begins after the model's reasoning, which the prompt leaves open."""
        stage = self.request.parsing_options.thinking_initial_stage
        return stage in (recipe.ThinkingInitialStage.ReasoningStart, recipe.ThinkingInitialStage.ReasoningContinuation)

    def parser(self, *, response_id: str, model: str) -> recipe.StreamProcessor:
        """A parser of one choice's answer; one for each choice.

        Push `ready`, then `tokens` (never text, never the end-of-sequence token), then `finish` unless `finished`
        became true: a stop string matched, and the rest of the answer is nobody's.
        """
        generator = recipe.ChatCompletionRequest.chunk_generator(self.request, response_id, model)
        return recipe.StreamProcessor(generator, self.request.parsing_options, self.tokenizer)


class PromptEncoder:
    """Encodes prompts for one model, served under one or more names (the first is the one to suggest)."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, *, served_names: Sequence[str]) -> None:
        """Raises CheckpointError if the tokenizer lacks the special tokens of the prompt format."""
        spellings = recipe_special_tokens()
        _check_special_tokens(tokenizer, config, spellings)
        self._config = config
        self._plain = tokenizer
        self._served_names = tuple(served_names)
        self._recipe_tokenizer = recipe.Tokenizer.from_str(tokenizer.json)
        self._encoding = (
            recipe.DeepseekV41Encoding().with_special_tokens(spellings).with_tokenizer(self._recipe_tokenizer)
        )
        versions = dict.fromkeys(served_names, recipe.ModelVersion.DeepseekV41Flash)
        self._options = recipe.ConversionOptions().with_model_versions_by_name(versions).with_special_tokens(spellings)

    @classmethod
    def from_dir(cls, directory: Path | str, config: ModelConfig, *, served_names: Sequence[str]) -> Self:
        """With the tokenizer of a checkpoint directory. Raises CheckpointError."""
        return cls(Tokenizer.from_dir(directory), config, served_names=served_names)

    def completion(self, text: str, *, context_tokens: int) -> list[int]:
        """Ids of a `/v1/completions` prompt: begin-of-sequence, then `text`, in which no spelling is special.

        Raises InvalidFieldError, and ContextLengthError for a text so long that its ids need not be counted.
        """
        self._check_length(text, context_tokens, field="prompt")
        try:
            text.encode()  # JSON can carry lone surrogates, which no tokenizer takes.
        except UnicodeEncodeError as error:
            raise InvalidFieldError("prompt", f"the text is not valid Unicode: {error.reason}") from error
        return [self._config.bos_token_id, *self._plain.encode(text)]

    def chat(self, body: Mapping[str, Any], *, context_tokens: int) -> ChatPrompt:
        """Convert and encode a `/v1/chat/completions` body. `n` is ignored: branches share the prompt.

        Raises ModelNotFoundError, ContextLengthError, InvalidFieldError naming the field, or RequestError.
        """
        fields = self._recipe_fields(body)
        request = self._convert(fields, body)
        if any(message.image_sources for message in request.conversation.messages):
            raise InvalidFieldError("messages", "this server takes no images")
        self._check_length(
            self._encoding.render_conversation(request.conversation).prompt, context_tokens, field="messages"
        )
        ids = self._encoding.encode(request.conversation)
        options = request.inference_options
        wanted = len(ids) + (options.max_tokens or 1)
        if wanted > context_tokens:
            raise ContextLengthError(tokens=wanted, tokens_max=context_tokens, field="messages")
        constraint = options.output_constraint
        return ChatPrompt(
            prompt_ids=ids,
            max_tokens=request.resolve_max_tokens(len(ids), context_tokens),
            stream=request.stream,
            temperature=_resolved(options.temperature),
            top_p=_resolved(options.top_p),
            seed=options.seed,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            constraint=None if constraint is None else (constraint.kind, constraint.schema),
            request=request,
            tokenizer=self._recipe_tokenizer,
        )

    def _check_length(self, text: str, context_tokens: int, *, field: str) -> None:
        """Encoding takes seconds for a megabyte: a text that cannot fit is not encoded only to be refused."""
        tokens = self._plain.tokens_at_least(text)
        if tokens > context_tokens:
            raise ContextLengthError(tokens=tokens, tokens_max=context_tokens, field=field)

    def _recipe_fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body as the prompt layer wants it: null is unset, newer names are the ones it knows."""
        fields = {name: value for name, value in body.items() if value is not None and name != "n"}
        model = fields.setdefault("model", self._served_names[0])
        if model not in self._served_names:
            raise ModelNotFoundError(str(model), self._served_names[0])
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        for name, value in _template_fields(fields.get("chat_template_kwargs")).items():
            fields.setdefault(name, value)
        return fields

    def _convert(self, fields: dict[str, Any], body: Mapping[str, Any]) -> recipe.ConversationRequest:
        try:
            return recipe.ChatCompletionRequest(fields).convert(self._options)
        except _REFUSALS as error:
            message = _message(error)
            field = self._bad_field(fields)
            if field is None:
                raise RequestError(message) from error
            renamed = field == "max_tokens" and body.get("max_completion_tokens") is not None
            raise InvalidFieldError("max_completion_tokens" if renamed else field, message) from error

    def _bad_field(self, fields: Mapping[str, Any]) -> str | None:
        """The field that is refused on its own too: the prompt layer's messages do not always name it."""
        harmless = {"model": fields["model"], "messages": [{"role": "user", "content": "."}]}
        for name, value in fields.items():
            try:
                recipe.ChatCompletionRequest({**harmless, name: value}).convert(self._options)
            except _REFUSALS:
                return name
        return None if "messages" in fields else "messages"


def _template_fields(arguments: object) -> dict[str, Any]:
    """`chat_template_kwargs` of other servers, in the prompt layer's words."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidFieldError("chat_template_kwargs", "chat_template_kwargs must be an object")
    fields: dict[str, Any] = {}
    thinking = arguments.get("thinking", arguments.get("enable_thinking"))
    if thinking is not None:
        fields["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if arguments.get("reasoning_effort") is not None:
        fields["reasoning_effort"] = arguments["reasoning_effort"]
    return fields


def _message(error: Exception) -> str:
    return str(error).removeprefix("invalid request body: ") or "the request body cannot be read"


def _resolved(value: float | None) -> float:
    assert value is not None, "conversion always resolves temperature and top_p"
    return value


def _check_special_tokens(tokenizer: Tokenizer, config: ModelConfig, spellings: recipe.SpecialTokens) -> None:
    ids = {spellings.token(token): tokenizer.token_id(spellings.token(token)) for token in _NEEDED}
    missing = [spelling for spelling, token_id in ids.items() if token_id is None]
    if missing:
        raise CheckpointError(f"tokenizer.json lacks the special tokens {', '.join(missing)} of the chat format")
    expected = {
        spellings.token(recipe.SpecialToken.Bos): config.bos_token_id,
        spellings.token(recipe.SpecialToken.Eos): config.eos_token_id,
        spellings.token(recipe.SpecialToken.Image): config.image_token_id,
    }
    for spelling, token_id in expected.items():
        if token_id is not None and tokenizer.token_id(spelling) != token_id:
            raise CheckpointError(
                f"tokenizer.json gives {spelling} the id {tokenizer.token_id(spelling)}, config.json says {token_id}"
            )
