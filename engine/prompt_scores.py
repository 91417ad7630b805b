"""Log-probabilities of a prompt's own tokens, taken chunk by chunk while the prompt is computed.

    rows of a step ──▶ Runner ──take (some rows' logits at a time)──▶ PromptScores ──told──▶ PromptTokensEvent

The row of token p scores token p + 1; the last row draws. Nothing of the vocabulary's width is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import InternalError

from .interface import SampledToken
from .sampling import are_numbers, logprobs_at
from .truncation import best_ranks, ids_of, ranks_of

SCORED_VALUES_AT_ONCE = 1 << 22
"""Logits that are there at a time: 16 MiB, whatever a chunk holds."""


class PromptScores:
    """Of one request. `wanted` and `take` are for the thread that computes, `told` for the engine's."""

    def __init__(self, prompt_ids: Sequence[int], *, top: int) -> None:
        """`top`: how many of the best tokens are told beside each of the prompt's."""
        self._prompt_ids = prompt_ids
        self._top = top
        self._row = 0
        self._untold: deque[SampledToken] = deque()
        self._told_to = 1

    def wanted(self, start: int, end: int) -> range:
        """Which of these rows score a token that has no score. Rows are computed in order, perhaps more than once."""
        first = max(start, self._row)
        return range(first, max(first, min(end, len(self._prompt_ids) - 1)))

    def take(self, logits: NDArray[np.float32]) -> None:
        """Raw logits [rows, vocab] float32 of the next rows. Raises InternalError if they are no numbers."""
        if not are_numbers(logits).all():
            raise InternalError("the model produced logits that are no numbers")
        first = self._row + 1
        ids = np.array(self._prompt_ids[first : first + len(logits)], np.int64)
        best = ids_of(best_ranks(ranks_of(logits), max(1, self._top)))
        told = logprobs_at(logits, np.concatenate([ids[:, None], best], axis=1))
        for token_id, top_ids, values in zip(ids.tolist(), best.tolist(), told.tolist(), strict=True):
            top = slice(self._top)
            self._untold.append(SampledToken(token_id, values[0], tuple(top_ids[top]), tuple(values[1:][top])))
        self._row += len(logits)

    def told(self, rows_done: int) -> tuple[int, tuple[SampledToken, ...]]:
        """Scores that have not been told, of rows below `rows_done`: the position of the first token, and all."""
        start = self._told_to
        count = min(rows_done + 1, len(self._prompt_ids)) - start
        self._told_to += max(0, count)
        return start, tuple(self._untold.popleft() for _ in range(count))

    def leave_to_another(self) -> None:
        """Another request tells them: nothing is left to be scored."""
        self._row = self._told_to = len(self._prompt_ids)
