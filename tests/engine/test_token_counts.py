"""Counts of tokens."""

from __future__ import annotations

from collections import Counter
from random import Random

from whalepod.engine.token_counts import TokenCounts


def _as_dict(counts: TokenCounts) -> dict[int, float]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_tokens_are_counted_however_they_came() -> None:
    rng = Random(2)
    tokens = [rng.randrange(90) for _ in range(400)]
    for given in (0, 1, 200):
        counts = TokenCounts(tokens[:given])
        for token in tokens[given:]:
            counts.add(token)
        assert _as_dict(counts) == Counter(tokens)


def test_more_tokens_change_nothing_of_what_they_are_added_to() -> None:
    counts = TokenCounts([5, 3, 5])
    assert _as_dict(counts.plus([3, *range(100, 140)])) == Counter([5, 3, 5, 3, *range(100, 140)])
    assert _as_dict(counts) == {5: 2, 3: 1}
