"""From a request's text to token ids, and the parser for what comes back: by the released prompt layer.

    body ──▶ PromptEncoder.chat ──▶ ChatPrompt(prompt_ids, max_tokens, …) ──▶ engine
                                        └─▶ parser(…) ◀── token ids ── engine

A conversation with images takes two steps, because images may have to be fetched in between: `begin` converts and
names them, `finish` is given them made ready and puts their spans in their places.

`protocols.py` says in which forms a body may come.

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
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
)

from .config import ModelConfig
from .protocols import CHAT, MESSAGES, RESPONSES, Protocol, set_fields, with_messages_wishes
from .special_tokens import recipe_special_tokens
from .tokenizer import Tokenizer
from .vision.preparation import ImagePreparer, PlacedImage, Preparation, PreparedImage

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

_REFUSALS = (recipe.ConversionError, ValueError, TypeError, OverflowError, RecursionError)
"""What the prompt layer raises for a body it cannot take. OverflowError: an integer of more than 64 bits, anywhere.
RecursionError: a value that is nested deeper than it follows."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A converted conversation. Values are resolved by the released rules: thinking forces the
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
    parsing: recipe.ParsingOptions
    tokenizer: recipe.Tokenizer
    protocol: Protocol = CHAT
    echo: recipe.ResponsesEcho | None = None
    """Settings that every object of a Responses answer repeats."""
    tool_namespaces: Mapping[str, tuple[str, str]] | None = None
    """Of a Responses request: the functions that were declared within a namespace."""
    images: tuple[PlacedImage, ...] = ()
    """In the order of their spans; every id of a span is the image token's."""

    @property
    def reasons_first(self) -> bool:
        """The answer begins after the model's reasoning, which the prompt leaves open."""
        stage = self.parsing.thinking_initial_stage
        return stage in (recipe.ThinkingInitialStage.ReasoningStart, recipe.ThinkingInitialStage.ReasoningContinuation)

    def parser(self, *, response_id: str, model: str) -> recipe.StreamProcessor:
        """A parser of one choice's answer; one for each choice.

        Push `ready`, then `tokens` (never text, never the end-of-sequence token), then `finish` unless `finished`
        became true: a stop string matched, and the rest of the answer is nobody's.
        """
        generator = self.protocol.request.chunk_generator(self.request, response_id, model)
        if self.echo is not None:
            generator = generator.with_echo(self.echo)
        if self.tool_namespaces:
            generator = generator.with_namespace_tool_map(dict(self.tool_namespaces))
        return recipe.StreamProcessor(generator, self.parsing, self.tokenizer)


@dataclass(frozen=True, slots=True)
class Conversed:
    """A conversation that was converted, and waits for its images."""

    request: recipe.ConversationRequest
    conversation: recipe.Conversation
    parsing: recipe.ParsingOptions
    protocol: Protocol
    echo: recipe.ResponsesEcho | None
    tool_namespaces: Mapping[str, tuple[str, str]] | None
    sources: tuple[recipe.ImageSource, ...]
    """In the order of their places in the prompt, which is not always that of the messages."""


class PromptEncoder:
    """Encodes prompts for one model, served under one or more names (the first is the one to suggest)."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, *, served_names: Sequence[str]) -> None:
        """Raises CheckpointError if the tokenizer lacks the special tokens of the prompt format."""
        spellings = recipe_special_tokens()
        _check_special_tokens(tokenizer, config, spellings)
        self._config = config
        self._plain = tokenizer
        self._served_names = tuple(served_names)
        self._preparer = None if config.vision_config is None else ImagePreparer(config.vision_config)
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

    def chat(self, body: Mapping[str, Any], *, context_tokens: int, protocol: Protocol = CHAT) -> ChatPrompt:
        """Convert and encode a conversation's body. `n` is ignored: branches share the prompt. Images must come with
        it, as data URLs.

        Raises ModelNotFoundError, ContextLengthError, InvalidFieldError naming the field, or RequestError.
        """
        begun = self.begin(body, context_tokens=context_tokens, protocol=protocol)
        if isinstance(begun, ChatPrompt):
            return begun
        images = self.begin_images(begun, begun.sources, context_tokens=context_tokens).all()
        return self.finish(begun, images, context_tokens=context_tokens)

    def begin(
        self, body: Mapping[str, Any], *, context_tokens: int, protocol: Protocol = CHAT
    ) -> ChatPrompt | Conversed:
        """As `chat` does it; a conversation with images is left for `finish`. Raises what `chat` does."""
        fields = self._recipe_fields(body, protocol)
        asked = _Asked(protocol, fields)
        request = self._convert(asked, fields, body)
        conversation, parsing = request.conversation, request.parsing_options
        if protocol is MESSAGES:
            conversation, parsing = with_messages_wishes(body, request)
        field = protocol.conversation_field
        rendered = self._encoding.render_conversation(conversation)
        if rendered.image_sources and self._preparer is None:
            raise InvalidFieldError(field, "this model sees no images")
        self._check_length(rendered.prompt, context_tokens, field=field)
        conversed = Conversed(
            request, conversation, parsing, protocol, asked.echo, asked.tool_namespaces, tuple(rendered.image_sources)
        )
        return conversed if conversed.sources else self.finish(conversed, (), context_tokens=context_tokens)

    def begin_images(
        self, conversed: Conversed, sources: Sequence[recipe.ImageSource], *, context_tokens: int
    ) -> Preparation:
        """To make the images of a conversation ready. `sources`: its own, or the same with what URLs led to. Raises
        ImageError if there are too many."""
        assert self._preparer is not None, "a model that sees no images has none to prepare"
        return self._preparer.begin(sources, field=conversed.protocol.conversation_field, tokens_max=context_tokens)

    def finish(self, conversed: Conversed, images: Sequence[PreparedImage], *, context_tokens: int) -> ChatPrompt:
        """`images`: one for each source. Raises ContextLengthError."""
        request, parsing = conversed.request, conversed.parsing
        ids, placed = self._with_spans(self._encoding.encode(conversed.conversation), images)
        options = request.inference_options
        wanted = len(ids) + (options.max_tokens or 1)
        if wanted > context_tokens:
            field = conversed.protocol.conversation_field
            raise ContextLengthError(tokens=wanted, tokens_max=context_tokens, field=field)
        return ChatPrompt(
            prompt_ids=ids,
            max_tokens=request.resolve_max_tokens(len(ids), context_tokens),
            stream=request.stream,
            temperature=_resolved(options.temperature),
            top_p=_resolved(options.top_p),
            seed=options.seed,
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            constraint=_constraint(options.output_constraint, opened=parsing.starts_in_tool_calls),
            request=request,
            parsing=parsing,
            tokenizer=self._recipe_tokenizer,
            protocol=conversed.protocol,
            echo=conversed.echo,
            tool_namespaces=conversed.tool_namespaces,
            images=placed,
        )

    def _with_spans(self, ids: list[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Each placeholder becomes its image's span."""
        if not images:
            return ids, ()
        token = self._config.image_token_id
        assert token is not None, "a model that sees images has a token for them"
        places = [index for index, token_id in enumerate(ids) if token_id == token]
        if len(places) != len(images):
            raise InternalError(f"the prompt has {len(places)} places for {len(images)} images")
        spanned: list[int] = []
        placed: list[PlacedImage] = []
        copied = 0
        for place, image in zip(places, images, strict=True):
            spanned += ids[copied:place]
            placed.append(PlacedImage(len(spanned), image))
            spanned += [token] * image.tokens
            copied = place + 1
        return spanned + ids[copied:], tuple(placed)

    def _check_length(self, text: str, context_tokens: int, *, field: str) -> None:
        """Encoding takes seconds for a megabyte: a text that cannot fit is not encoded only to be refused."""
        tokens = self._plain.tokens_at_least(text)
        if tokens > context_tokens:
            raise ContextLengthError(tokens=tokens, tokens_max=context_tokens, field=field)

    def _recipe_fields(self, body: Mapping[str, Any], protocol: Protocol) -> dict[str, Any]:
        """The body as the prompt layer wants it: null is unset, newer names are the ones it knows."""
        fields = protocol.fields(set_fields(body))
        model = fields.setdefault("model", self._served_names[0])
        if model not in self._served_names:
            raise ModelNotFoundError(str(model), self._served_names[0])
        if protocol is CHAT:
            for name, value in _template_fields(fields.get("chat_template_kwargs")).items():
                fields.setdefault(name, value)
        return fields

    def _convert(self, asked: _Asked, fields: Mapping[str, Any], body: Mapping[str, Any]) -> recipe.ConversationRequest:
        try:
            return asked.convert(self._options)
        except _REFUSALS as error:
            message = _message(error)
            field = self._bad_field(asked.protocol, fields)
            if field is None:
                raise RequestError(message) from error
            if field == "max_tokens" and body.get("max_completion_tokens") is not None:
                field = "max_completion_tokens"
            # The protocol of some clients has no other place for the name.
            raise InvalidFieldError(field, message if field in message else f"{field}: {message}") from error

    def _bad_field(self, protocol: Protocol, fields: Mapping[str, Any]) -> str | None:
        """The field that is refused on its own too: the prompt layer's messages do not always name it."""
        for name, value in fields.items():
            try:
                protocol.request({"model": fields["model"], **protocol.harmless, name: value}).convert(self._options)
            except _REFUSALS:
                return name
        return None if protocol.conversation_field in fields else protocol.conversation_field


class _Asked:
    """A body on its way through the layer, which consumes what it converts."""

    def __init__(self, protocol: Protocol, fields: Mapping[str, Any]) -> None:
        self.protocol = protocol
        self.echo: recipe.ResponsesEcho | None = None
        self.tool_namespaces: Mapping[str, tuple[str, str]] | None = None
        self._fields = dict(fields)

    def convert(self, options: recipe.ConversionOptions) -> recipe.ConversationRequest:
        request = self.protocol.request(self._fields)
        if self.protocol is RESPONSES:
            self.echo = request.echo()
            self.tool_namespaces = request.namespace_tool_map(options)
        return request.convert(options)


def _template_fields(arguments: object) -> dict[str, Any]:
    """`chat_template_kwargs` of other servers, in the prompt layer's words."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise InvalidFieldError("chat_template_kwargs", "chat_template_kwargs must be an object")
    fields: dict[str, Any] = {}
    thinking = arguments.get("thinking", arguments.get("enable_thinking"))
    if thinking is not None:
        if not isinstance(thinking, bool):
            raise InvalidFieldError(
                "chat_template_kwargs", f"chat_template_kwargs: thinking must be true or false, not {thinking!r}"
            )
        fields["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if arguments.get("reasoning_effort") is not None:
        fields["reasoning_effort"] = arguments["reasoning_effort"]
    return fields


def _constraint(constraint: recipe.OutputConstraint | None, *, opened: bool) -> tuple[str, str] | None:
    """`opened`: the prompt has begun the calls, whatever the layer thought of it."""
    if constraint is None:
        return None
    kind = "tool_call_required" if opened and constraint.kind == "tool_call" else constraint.kind
    return kind, constraint.schema


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
