"""Where n-gram rows lie: the constants of the Engram hash, as the released model derives them from its configuration.

Each n-gram layer owns one table. Its columns are ordered by n-gram size (2, 3, …), then head; a column owns a range of
rows whose length is a prime, so that `hash mod prime + offset` names a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from whalepod.core.errors import ConfigError

SEED_PER_LAYER = 10007
"""The released hash seeds NumPy's generator with 10007 · layer id."""
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngramLayout:
    """One n-gram layer's table. Columns: (n - 2) · heads + head."""

    primes: tuple[int, ...]
    """Rows of each column."""
    offsets: tuple[int, ...]
    """First row of each column."""
    multipliers: tuple[int, ...]
    """Odd factors of the token itself, its predecessor, …; one per token of the longest n-gram."""

    @property
    def rows(self) -> int:
        return self.offsets[-1] + self.primes[-1]


def engram_layouts(
    layer_ids: Sequence[int], *, vocab_size: int, max_ngram_size: int, n_heads: int, compressed_vocab_size: int
) -> tuple[EngramLayout, ...]:
    """Layouts of all n-gram layers, in order.

    Primes come from one walk that all layers share: for each layer and each n-gram size it starts at `vocab_size` and
    takes, per head, the next prime that no column has taken before.
    """
    if not layer_ids:
        return ()
    if max_ngram_size < 2 or n_heads < 1 or compressed_vocab_size < 1:
        raise ConfigError(
            "engram_max_ngram_size must be at least 2, engram_n_heads and engram_compressed_vocab_size at least 1"
        )
    taken: set[int] = set()
    layouts: list[EngramLayout] = []
    for layer_id in layer_ids:
        primes: list[int] = []
        for _ in range(2, max_ngram_size + 1):
            number = vocab_size - 1
            for _ in range(n_heads):
                number = _next_free_prime(number, taken)
                taken.add(number)
                primes.append(number)
        layouts.append(
            EngramLayout(
                primes=tuple(primes),
                offsets=(0, *accumulate(primes[:-1])),
                multipliers=_multipliers(layer_id, max_ngram_size, compressed_vocab_size),
            )
        )
    return tuple(layouts)


def _multipliers(layer_id: int, count: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd, and so small that a product with a compressed id stays below 2^63."""
    bound = INT64_MAX // compressed_vocab_size // 2
    drawn = np.random.default_rng(SEED_PER_LAYER * layer_id).integers(0, bound, size=count, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


def _next_free_prime(number: int, taken: set[int]) -> int:
    number += 1
    while number in taken or not _is_prime(number):
        number += 1
    return number


def _is_prime(number: int) -> bool:
    """Trial division: table sizes are around 1.6e7, so at most 4,000 divisors."""
    if number < 2:
        return False
    if number % 2 == 0:
        return number == 2
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))
