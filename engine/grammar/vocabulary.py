"""The model's vocabulary as grammars see it: which bytes each token adds, and which tokens no text may produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import llguidance
import numpy as np
from deepseek_recipe import SpecialToken

from whalepod.model.special_tokens import recipe_special_tokens
from whalepod.model.tokenizer import Tokenizer

from .masks import MaskWords, pack

_EOS_NAME = b"<eos>"
# Bytes that UTF-8 never has. llguidance marks special tokens with 0xFF.
_NO_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Made once for each tokenizer. Safe to use from several threads."""

    size: int
    """Of a row of logits. Ids past the tokenizer's have no text."""
    eos_id: int
    text_words: MaskWords
    """[words(size)] uint32: tokens that add text. Special tokens are not among them, however they are spelled."""
    call_marker_id: int | None
    """Of the special token with which the model calls tools, if its tokenizer has it."""
    llguidance: llguidance.LLTokenizer

    @classmethod
    def create(cls, tokenizer: Tokenizer, *, size: int, eos_id: int) -> Self:
        """About a second for 129,280 tokens."""
        tokens = [_text_bytes(tokenizer, token_id) for token_id in range(size)]
        text = np.array([bool(token) for token in tokens])
        tokens[eos_id] = _EOS_NAME
        wrapper = _Wrapper(tokens, eos_id, tokenizer)
        return cls(
            size=size,
            eos_id=eos_id,
            text_words=pack(text),
            call_marker_id=tokenizer.token_id(recipe_special_tokens().token(SpecialToken.Dsml)),
            llguidance=llguidance.LLTokenizer(wrapper, eos_token=eos_id),  # pyright: ignore[reportArgumentType]  # by shape
        )


def _text_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Empty for what must not appear in an answer's text."""
    token = tokenizer.token_bytes(token_id)
    return b"" if token_id in tokenizer.special_ids or not _NO_UTF8.isdisjoint(token) else token


class _Wrapper:
    """What `LLTokenizer` asks for. Where a grammar leaves one text only, it allows the token that `encode` begins with,
    as the model has learned to write it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_id: int, tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_id
        self.special_token_ids = [eos_id]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)
