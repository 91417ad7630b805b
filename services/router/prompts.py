"""The `prompt` field of `/v1/completions`: a text, a list of texts, token ids, or a list of lists of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from whalepod.core.errors import InvalidFieldError

PROMPTS_MAX = 128

EMPTY = "prompt must not be empty"
FORMS = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    ids: Sequence[int]


Prompt = TextPrompt | IdsPrompt


def parse_prompts(value: object, *, vocab_size: int) -> list[Prompt]:
    """At least one prompt, none of them empty. Raises InvalidFieldError naming `prompt`."""
    if isinstance(value, str):
        return [_text(value)]
    if isinstance(value, array):
        return [packed_prompt(value, vocab_size=vocab_size, field="prompt")]
    if not isinstance(value, list):
        raise InvalidFieldError("prompt", EMPTY if value is None else FORMS)
    if not value:
        raise InvalidFieldError("prompt", EMPTY)
    # One pass at C speed: a prompt may have a million ids. `True` is no id, though Python counts it as an int.
    types = set(map(type, value))
    if types == {int}:
        return [parse_ids(value, vocab_size=vocab_size)]
    if len(value) > PROMPTS_MAX:
        raise InvalidFieldError("prompt", f"a request may have at most {PROMPTS_MAX} prompts, not {len(value)}")
    if types == {str}:
        return [_text(text) for text in value]
    if types == {list}:
        return [parse_ids(ids, vocab_size=vocab_size) for ids in value]
    raise InvalidFieldError("prompt", FORMS)


def parse_ids(ids: list[object], *, vocab_size: int, field: str = "prompt") -> IdsPrompt:
    """Raises InvalidFieldError naming `field` on an empty list or anything that is no id of the vocabulary."""
    if not ids:
        raise InvalidFieldError(field, EMPTY)
    if set(map(type, ids)) != {int}:
        raise InvalidFieldError(field, FORMS)
    try:
        packed = array("I", cast("list[int]", ids))
    except OverflowError:
        packed = array("I", [vocab_size])
    return packed_prompt(packed, vocab_size=vocab_size, field=field)


def packed_prompt(ids: array[int], *, vocab_size: int, field: str = "prompt") -> IdsPrompt:
    """`ids`: uint32, at least one. Raises InvalidFieldError naming `field` on one outside the vocabulary."""
    if int(np.frombuffer(ids, dtype=np.uint32).max()) >= vocab_size:
        raise InvalidFieldError(field, f"token ids must be in [0, {vocab_size})")
    return IdsPrompt(ids)


def _text(text: str) -> TextPrompt:
    if not text:
        raise InvalidFieldError("prompt", EMPTY)
    return TextPrompt(text)
