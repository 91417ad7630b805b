"""Log-probabilities of a prompt's own tokens, on their way to the client.

choices of one prompt ── scores (from the first that has them) ──▶ ScoreBook ── whole ──▶ the choices' deltas go on
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from whalepod.engine.interface import SampledToken

from .language import Language
from .text_choice import TextScores

T = TypeVar("T")


class ScoreBook:
    """Of one prompt. `scores[i]` is of the token at position i; the first has none."""

    def __init__(self, prompt_tokens: int) -> None:
        self.scores: list[SampledToken | None] = [None]
        self._prompt_tokens = prompt_tokens

    @property
    def whole(self) -> bool:
        return len(self.scores) >= self._prompt_tokens

    def note(self, start: int, tokens: Sequence[SampledToken]) -> None:
        """Several choices may tell the same."""
        known = len(self.scores) - start
        if 0 <= known < len(tokens):
            self.scores += tokens[known:]

    def to_json(self, prompt_ids: Sequence[int], language: Language) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token the best and itself, by id."""
        return [None if score is None else _entry(score, language) for score in self.scores[: len(prompt_ids)]]


def _entry(score: SampledToken, language: Language) -> dict[str, Any]:
    """`rank` is known of the best only."""
    entry: dict[str, Any] = {}
    for rank, (token_id, logprob) in enumerate(zip(score.top_ids, score.top_logprobs, strict=True), start=1):
        entry[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": language.token_text(token_id)}
    own = {"logprob": score.logprob, "rank": None, "decoded_token": language.token_text(score.id)}
    entry.setdefault(str(score.id), own)
    return entry


def after_scores(
    events: AsyncGenerator[tuple[int, T | TextScores], None], books: Sequence[ScoreBook], *, choices_each: int
) -> AsyncGenerator[tuple[int, T], None]:
    """The events without the scores, which are in the books; none of a prompt before its book is whole."""
    if all(book.whole for book in books):
        return cast("AsyncGenerator[tuple[int, T], None]", events)  # nobody asked for scores, so there are none
    return _scored(events, books, choices_each)


async def _scored(
    events: AsyncGenerator[tuple[int, T | TextScores], None], books: Sequence[ScoreBook], choices_each: int
) -> AsyncGenerator[tuple[int, T], None]:
    held: list[list[tuple[int, T]]] = [[] for _ in books]
    async with aclosing(events):
        async for index, event in events:
            book, waiting = books[index // choices_each], held[index // choices_each]
            if isinstance(event, TextScores):
                book.note(event.start, event.tokens)
            else:
                waiting.append((index, event))
            if book.whole:
                for item in waiting:
                    yield item
                waiting.clear()
    assert not any(held), "a rank scores the whole prompt before it draws"
