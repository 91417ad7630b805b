"""Bodies of HTTP requests: which fields are known, and of what type. Unknown fields are ignored, null is unset.

A field with a bad value is an InvalidFieldError that names it; ranges of sampling values are `SamplingParams`' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from whalepod.core.errors import InvalidFieldError
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import ALLOWED_IDS_MAX, BAD_WORD_CHARS_MAX, BAD_WORDS_MAX, SamplingParams

from .tenancy import USER_CHARS_MAX

TEMPERATURE_MAX = 2.0
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 1024
LOGIT_BIASES_MAX = 4096
ID_DIGITS_MAX = 10
"""Of a token id that is written as text."""
CHOICES_MAX = 128
COMPLETION_MAX_TOKENS = 16
"""Of `/v1/completions` when the request does not say: OpenAI's default."""

_STRICT = ConfigDict(extra="ignore", strict=True, frozen=True)
StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
BadWord = Annotated[str, Field(min_length=1, max_length=BAD_WORD_CHARS_MAX)]


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool = False


class SamplingBody(BaseModel):
    """Fields that both generating endpoints take, beside those that each resolves in its own way."""

    model_config = _STRICT

    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default=[], max_length=STOP_IDS_MAX)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default={}, max_length=LOGIT_BIASES_MAX)
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=ALLOWED_IDS_MAX)
    bad_words: list[BadWord] = Field(default=[], max_length=BAD_WORDS_MAX)

    def to_params(
        self,
        *,
        vocab_size: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        logprobs: int | None,
        max_tokens: int,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Raises InvalidFieldError, naming the field, on a bad value or an id outside the vocabulary."""
        if temperature > TEMPERATURE_MAX:
            raise InvalidFieldError("temperature", f"temperature must be in [0, 2], not {temperature}")
        biases = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if len(biases) < len(self.logit_bias):  # 5 and 05
            raise InvalidFieldError("logit_bias", "logit_bias must name each token once")
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size=vocab_size)
        check_token_ids("logit_bias", biases, vocab_size=vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size=vocab_size)
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=biases,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=self.bad_words,
        )


class ServingBody(BaseModel):
    """Fields that say how a request is served, the same at both generating endpoints."""

    model_config = _STRICT

    model: str | None = None
    n: int = Field(default=1, ge=1, le=CHOICES_MAX)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    cache_salt: str | None = None
    fidelity: Literal["fast", "exact"] | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)

    def fidelity_or(self, default: Fidelity) -> Fidelity:
        return Fidelity(self.fidelity) if self.fidelity is not None else default


class UserBody(BaseModel):
    """Whom the client answers for: its prefixes are shared with nobody else's."""

    model_config = _STRICT

    user: str | None = Field(default=None, max_length=USER_CHARS_MAX)


class PromptScoresBody(BaseModel):
    """For conversations: vLLM's way to have the prompt scored."""

    model_config = _STRICT

    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)


class SeedBody(BaseModel):
    """For the protocols that have no seed of their own."""

    model_config = _STRICT

    seed: int | None = None


class CompletionBody(BaseModel):
    """The fields of `/v1/completions` alone. `prompt` is checked by `prompts.py`."""

    model_config = _STRICT

    prompt: Any = None
    max_tokens: int = Field(default=COMPLETION_MAX_TOKENS, ge=0)
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)] = []
    logprobs: int | None = Field(default=None, ge=0, le=20)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TokenizeBody(BaseModel):
    """One of `prompt` and `messages`."""

    model_config = _STRICT

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    model_config = _STRICT

    model: str | None = None
    tokens: Any = None


NOT_DONE: Mapping[str, str] = {
    "logits_processors": "this server runs no code of its clients",
    "prompt_embeds": "a prompt is text or token ids",
    "truncate_prompt_tokens": "shorten the prompt before it is sent; /tokenize counts its tokens",
    "return_tokens_as_token_ids": "return_token_ids gives the ids of a choice",
    "use_beam_search": "tokens are sampled",
}
"""What other servers take and would answer otherwise: to ignore it would be another answer than was asked for."""

Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: Mapping[str, Any]) -> Body:
    """The fields of `body` that `model` knows. Raises InvalidFieldError for the first bad one."""
    fields = _field_names(model)
    known = {name: value for name, value in body.items() if name in fields and value is not None}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        problem = _most_telling(error)
        name, *inside = problem["loc"]
        message = problem["msg"][0].lower() + problem["msg"][1:]
        raise InvalidFieldError(str(name), f"{name}{_place_in_field(inside)}: {message}") from None


def _most_telling(error: ValidationError) -> ErrorDetails:
    """Of what is wrong with the first bad field. A value that may be of several types is wrong for each of them: that
    it is none of the first says less than what is wrong with it as the one that it is of."""
    problems = error.errors(include_url=False, include_context=False)
    first = [problem for problem in problems if problem["loc"][0] == problems[0]["loc"][0]]
    return next((problem for problem in first if not problem["type"].endswith("_type")), first[0])


def _place_in_field(steps: Sequence[int | str]) -> str:
    """Numbers and names of fields; what the types of a union are called says nothing to a client."""
    fields = StreamOptions.model_fields
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" if step in fields else "" for step in steps)


@cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(model.model_fields)


def refuse_fields(body: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises InvalidFieldError for the first field of `refused` (name to reason) that the body sets to anything."""
    for name, reason in refused.items():
        if body.get(name) not in (None, [], {}, "", False):
            raise InvalidFieldError(name, f"{name} is not supported: {reason}")


def check_token_ids(field: str, ids: Iterable[int], *, vocab_size: int) -> None:
    """Raises InvalidFieldError for the first id outside the vocabulary."""
    stranger = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if stranger is not None:
        raise InvalidFieldError(field, f"{field}: token id {stranger} is not in the vocabulary of {vocab_size}")


def _token_id(key: str) -> int:
    """Digits alone: `int` would also read other alphabets' digits, spaces and `1_0`."""
    if not (key.isascii() and key.isdigit() and len(key) <= ID_DIGITS_MAX):
        raise InvalidFieldError("logit_bias", f"logit_bias: {key[:40]!r} is not a token id")
    return int(key)
