"""Against fractions worked out by hand, against the formula written as loops, and as a law: chances add up to 1."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from whalepod.engine.evaluation.kneser_ney import FALLBACK_DISCOUNTS, KneserNey, discounts

BOS, A, B, C = range(4)


def test_chances_of_a_text_of_six_tokens_are_those_worked_out_by_hand() -> None:
    # <A B A B> <A C>. Counts of pairs: ^A 2, AB 2, BA 1, AC 1. Different tokens before: A 2 (^, B), B 1, C 1.
    # Too few counts to estimate discounts: 0.5, 1 and 1.5 it is.
    model = KneserNey.trained(np.array([BOS, A, B, A, B, BOS, A, C]), vocab_size=4, bos_id=BOS, order=2)
    # One token: (2 - 1) / 4, (1 - 0.5) / 4 twice; 2 / 4 is given away, a third of it to each of A, B, C.
    one = {A: Fraction(1, 4) + Fraction(1, 6), B: Fraction(1, 8) + Fraction(1, 6), C: Fraction(1, 8) + Fraction(1, 6)}
    # Behind A: AB 2 and AC 1 of 3; 1 and 0.5 are given away.
    behind_a = {
        A: Fraction(1, 2) * one[A],
        B: Fraction(1, 3) + Fraction(1, 2) * one[B],
        C: Fraction(1, 6) + Fraction(1, 2) * one[C],
    }
    # Behind ^: ^A 2 of 2, 1 of it given away. Behind B: BA 1 of 1, half given away. Behind C: nothing was ever seen.
    expected = {
        (BOS, A): Fraction(1, 2) + Fraction(1, 2) * one[A],
        (BOS, C): Fraction(1, 2) * one[C],
        (BOS, A, A): behind_a[A],
        (BOS, A, B): behind_a[B],
        (BOS, A, C): behind_a[C],
        (BOS, B, A): Fraction(1, 2) + Fraction(1, 2) * one[A],
        (BOS, C, B): one[B],
    }
    for text, chance in expected.items():
        found = np.exp(model.log_probabilities(np.array(text))[-1])
        assert found == pytest.approx(float(chance), abs=1e-12), text
    assert sum(behind_a.values()) == 1


def test_discounts_follow_from_how_many_counts_of_each_size_there_are() -> None:
    # 4 ones, 2 twos, 1 three, 1 four: Y = 4 / 8.
    assert discounts(np.array([1, 1, 1, 1, 2, 2, 3, 4])) == (0.5, 1.25, 1.0)
    assert discounts(np.array([1, 1, 2, 5])) == FALLBACK_DISCOUNTS


def random_text(*, documents: int, vocab_size: int, seed: int) -> np.ndarray:
    """Zipf's law, so that counts of every size occur."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab_size)
    texts = [
        [BOS, *rng.choice(np.arange(1, vocab_size), size=rng.integers(0, 30), p=weights / weights.sum())]
        for _ in range(documents)
    ]
    return np.concatenate(texts).astype(np.int64)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_chances_of_all_tokens_add_up_to_one_behind_any_context(order: int) -> None:
    vocab_size = 12
    model = KneserNey.trained(
        random_text(documents=60, vocab_size=vocab_size, seed=1), vocab_size=vocab_size, bos_id=BOS, order=order
    )
    seen = random_text(documents=8, vocab_size=vocab_size, seed=2)
    for end in range(1, len(seen)):
        start = int(np.flatnonzero(seen[:end] == BOS)[-1])
        rows = [np.append(seen[start:end], token) for token in range(1, vocab_size)]
        chances = [np.exp(model.log_probabilities(row)[-1]) for row in rows]
        assert sum(chances) == pytest.approx(1, abs=1e-12)
        assert min(chances) > 0


def test_a_text_scores_as_the_formula_written_as_loops_says() -> None:
    text, vocab_size = random_text(documents=80, vocab_size=9, seed=3), 9
    model, loops = KneserNey.trained(text, vocab_size=vocab_size, bos_id=BOS), Loops(text, vocab_size, order=5)
    held_out = random_text(documents=20, vocab_size=vocab_size, seed=4)
    found, start = model.log_probabilities(held_out), 0
    for place, token in enumerate(held_out):
        if token == BOS:
            start = place
            assert found[place] == 0
        else:
            chance = loops.chance(tuple(held_out[start:place][-4:]), int(token))
            assert np.exp(found[place]) == pytest.approx(chance, rel=1e-12)


class Loops:
    """The same law, with dictionaries, one document and one n-gram at a time."""

    def __init__(self, text: np.ndarray, vocab_size: int, *, order: int) -> None:
        self.vocab_size = vocab_size
        documents = [part.tolist() for part in np.split(text, np.flatnonzero(text == BOS))[1:]]
        raw: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
        for document in documents:
            for length in range(1, order + 2):
                for start in range(len(document) - length + 1):
                    raw[length][tuple(document[start : start + length])] += 1
        self.counts: dict[int, dict[tuple[int, ...], int]] = {}
        for length in range(1, order + 1):
            before = Counter(ngram[1:] for ngram in raw[length + 1])
            self.counts[length] = {
                ngram: count if length == order or ngram[0] == BOS else before[ngram]
                for ngram, count in raw[length].items()
                if ngram != (BOS,)
            }

    def chance(self, context: Sequence[int], token: int) -> float:
        shorter = 1 / (self.vocab_size - 1) if not context else self.chance(context[1:], token)
        counts = self.counts[len(context) + 1]
        lost = (0.0, *discounts(np.array(list(counts.values()))))
        behind = {ngram[-1]: count for ngram, count in counts.items() if ngram[:-1] == tuple(context)}
        if not behind:
            return shorter
        given = sum(lost[min(count, 3)] for count in behind.values())
        own = behind.get(token, 0)
        return (own - lost[min(own, 3)] + given * shorter) / sum(behind.values())


def test_what_is_no_text_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="below 4"):
        KneserNey.trained(np.array([BOS, 4]), vocab_size=4, bos_id=BOS)
    with pytest.raises(ValueError, match="begins with token 0"):
        KneserNey.trained(np.array([A, B]), vocab_size=4, bos_id=BOS)
