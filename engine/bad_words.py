"""Words that an answer must not hold: as tokens, and which tokens would complete one.

Words are texts where clients write them and token ids where they are looked for: no rank needs to read text. A word is
looked for as it is encoded by itself, with and without a space before it; other tokens that spell it are not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import InvalidFieldError

from .sampling_params import BAD_WORD_TOKENS_MAX, SamplingParams


def encode_bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """`params` with `bad_words` among `bad_word_ids`. Raises InvalidFieldError on a word of too many tokens."""
    if not params.bad_words:
        return params
    words = dict.fromkeys(params.bad_word_ids)
    for word in params.bad_words:
        bare = word.lstrip() or word
        for spelling in (bare, " " + bare):
            ids = tuple(encode(spelling))
            if not 0 < len(ids) <= BAD_WORD_TOKENS_MAX:
                raise InvalidFieldError(
                    "bad_words",
                    f"bad_words must have at most {BAD_WORD_TOKENS_MAX} tokens each, and {word[:40]!r} has {len(ids)}",
                )
            words[ids] = None
    return replace(params, bad_words=(), bad_word_ids=tuple(words))


class BadWords:
    """Where an answer stands among its bad words. Only output counts: a word may begin in the prompt."""

    def __init__(self, words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> None:
        """`words`: each at least one token id."""
        self._single = {word[0] for word in words if len(word) == 1}
        self._single_ids = np.array(sorted(self._single), np.int64)
        self._longer = [tuple(word) for word in words if len(word) > 1]
        self._last_ids = deque(output_ids, maxlen=max(map(len, self._longer), default=1) - 1)

    def observe(self, token_id: int) -> None:
        self._last_ids.append(token_id)

    def next_ids(self, drafts: Sequence[int] = ()) -> NDArray[np.int64]:
        """[ids] ascending, each once: what would complete a word after `drafts`, which follow what was observed."""
        if not self._longer:
            return self._single_ids
        last = (*self._last_ids, *drafts)
        completing = {word[-1] for word in self._longer if last[1 - len(word) :] == word[:-1]}
        return np.array(sorted(self._single | completing), np.int64) if completing else self._single_ids
