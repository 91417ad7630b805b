"""An n-gram model with interpolated, modified Kneser-Ney smoothing: what a trained network has to beat.

    p_n(w | c) = (a(c w) − D(a(c w))) / a(c ·)  +  γ(c) · p_{n−1}(w | c without its first token)
    p_0 = 1 / (vocabulary − 1)

`a` is the count at the highest order, below it the number of different tokens seen before (Chen and Goodman, 1999).
An n-gram that begins with begin-of-sequence has nothing before it, so its own count is taken. That token itself is
given and never predicted. Documents do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

UNKNOWN = -1
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Of counts of 1, 2, and more, where too few counts occur to estimate them."""


@dataclass(frozen=True, slots=True)
class _Order:
    """The n-grams of one length. Contexts are numbered as the n-grams that are one token shorter."""

    keys: NDArray[np.uint64]
    """Ascending: context · vocabulary + last token. The place in it is the n-gram's number."""
    kept: Floats
    """Of each n-gram: its count less the discount."""
    totals: Floats
    """Of each context: what counts behind it add up to; 0: nothing ever followed."""
    given: Floats
    """Of each context: what the discounts add up to, and shorter contexts share."""

    def find(self, keys: NDArray[np.uint64]) -> Ids:
        """Numbers of n-grams, UNKNOWN where there is none."""
        if not len(self.keys):
            return np.full(len(keys), UNKNOWN, np.int64)
        places = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == keys, places, UNKNOWN)


@dataclass(frozen=True, slots=True)
class KneserNey:
    vocab_size: int
    bos_id: int
    orders: Sequence[_Order]
    """Of n-grams of 1, 2 … tokens."""

    @classmethod
    def trained(
        cls,
        tokens: NDArray[Any],
        *,
        vocab_size: int,
        bos_id: int,
        order: int = 5,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """tokens [count], documents one after the other, each from its begin-of-sequence on. `progress` is told orders
        done and orders in all. Needs about 100 bytes a token. Raises ValueError if a token is outside the vocabulary or
        the first is no begin-of-sequence."""
        ids = tokens.astype(np.int64)
        _check(ids, vocab_size=vocab_size, bos_id=bos_id)
        depths = _depths(ids, bos_id=bos_id)
        keys = np.arange(vocab_size, dtype=np.uint64)
        predicted = np.bincount(ids[ids != bos_id], minlength=vocab_size)
        seen = _Seen(numbers=ids, firsts=np.zeros(0, np.int64), counts=predicted)
        orders: list[_Order] = []
        contexts = 1
        for length in range(1, order + 1):
            counts, longer = seen.counts, None
            if length < order:
                longer = _longer(seen, ids, depths, length + 1, vocab_size)
                counts = _continuations(seen, longer[1], opening=seen.numbers[depths == length - 1], length=length)
            orders.append(_order(keys, counts, contexts=contexts, vocab_size=vocab_size))
            contexts = len(counts)
            if longer is not None:
                keys, seen = longer
            if progress is not None:
                progress(length, order)
        return cls(vocab_size, bos_id, orders)

    def log_probabilities(self, tokens: NDArray[Any]) -> Floats:
        """tokens [count], as for `trained` -> [count] natural logarithms, of each token behind those before it in its
        document; 0 for begin-of-sequence."""
        ids = tokens.astype(np.int64)
        _check(ids, vocab_size=self.vocab_size, bos_id=self.bos_id)
        depths = _depths(ids, bos_id=self.bos_id)
        contexts = np.zeros(len(ids), np.int64)
        chances = np.full(len(ids), 1.0 / (self.vocab_size - 1))
        for length, order in enumerate(self.orders, start=1):
            known = (depths >= max(1, length - 1)) & (contexts != UNKNOWN)
            numbers = np.full(len(ids), UNKNOWN, np.int64)
            numbers[known] = order.find(_keys(contexts[known], ids[known], self.vocab_size))
            chances[known] = _mixed(order, contexts[known], numbers[known], chances[known])
            if length == 1:
                numbers = ids  # a context may begin with begin-of-sequence, which nothing predicts
            contexts = np.concatenate(([UNKNOWN], numbers[:-1]))
        return np.where(depths == 0, 0.0, np.log(chances))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The n-grams of one length in the training text."""

    numbers: Ids
    """[tokens] of the n-gram that ends here, UNKNOWN where the document is too short."""
    firsts: Ids
    """[n-grams] where each ends for the first time."""
    counts: Ids
    """[n-grams]"""


def discounts(counts: NDArray[Any]) -> tuple[float, float, float]:
    """What counts of 1, of 2, and above lose, from how many counts of 1 … 4 there are."""
    ones, twos, threes, fours = (int((counts == value).sum()) for value in (1, 2, 3, 4))
    if not (ones and twos and threes and fours):
        return FALLBACK_DISCOUNTS
    share = ones / (ones + 2 * twos)
    lost = (1 - 2 * share * twos / ones, 2 - 3 * share * threes / twos, 3 - 4 * share * fours / threes)
    if not all(0 <= value <= count for count, value in enumerate(lost, start=1)):
        return FALLBACK_DISCOUNTS
    return lost


def _order(keys: NDArray[np.uint64], counts: Ids, *, contexts: int, vocab_size: int) -> _Order:
    """`counts` [n-grams] as they are weighed at this length."""
    lost = np.array([0.0, *discounts(counts)])[np.minimum(counts, 3)]
    owners = (keys // np.uint64(vocab_size)).astype(np.int64)
    return _Order(
        keys=keys,
        kept=(counts - lost).astype(np.float64),
        totals=np.bincount(owners, counts, minlength=contexts).astype(np.float64),
        given=np.bincount(owners, lost, minlength=contexts).astype(np.float64),
    )


def _longer(seen: _Seen, ids: Ids, depths: Ids, length: int, vocab_size: int) -> tuple[NDArray[np.uint64], _Seen]:
    """The n-grams of `length`, one token more than those `seen` have: their keys, and they."""
    ends = np.flatnonzero(depths >= length - 1)
    keys, firsts, numbers = np.unique(
        _keys(seen.numbers[ends - 1], ids[ends], vocab_size), return_index=True, return_inverse=True
    )
    of_each = np.full(len(ids), UNKNOWN, np.int64)
    of_each[ends] = numbers
    return keys, _Seen(of_each, ends[firsts], np.bincount(numbers, minlength=len(keys)))


def _continuations(seen: _Seen, longer: _Seen, *, opening: Ids, length: int) -> Ids:
    """[n-grams seen] how many different tokens were before each. `opening`: those that begin a document, which keep
    their counts; a single token that does is never predicted."""
    counts = np.bincount(seen.numbers[longer.firsts], minlength=len(seen.counts))
    if length > 1:
        counts[opening] = seen.counts[opening]
    return counts


def _mixed(order: _Order, contexts: Ids, numbers: Ids, shorter: Floats) -> Floats:
    totals = order.totals[contexts]
    kept = np.where(numbers == UNKNOWN, 0.0, order.kept[numbers])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(totals > 0, (kept + order.given[contexts] * shorter) / totals, shorter)


def _keys(contexts: Ids, tokens: Ids, vocab_size: int) -> NDArray[np.uint64]:
    return contexts.astype(np.uint64) * np.uint64(vocab_size) + tokens.astype(np.uint64)


def _depths(ids: Ids, *, bos_id: int) -> Ids:
    """How many tokens of its document are before each."""
    starts = np.flatnonzero(ids == bos_id)
    lengths = np.diff(np.append(starts, len(ids)))
    return np.arange(len(ids)) - np.repeat(starts, lengths)


def _check(ids: Ids, *, vocab_size: int, bos_id: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"tokens must be below {vocab_size}, not {int(ids.min())} … {int(ids.max())}")
    if len(ids) and ids[0] != bos_id:
        raise ValueError(f"a document begins with token {bos_id}, not {int(ids[0])}")
