"""Top-k, top-p and min-p, for all rows at once. Each keeps the first tokens of one order, best weight first and lowest
id among equals, so that what a row keeps is a number of tokens: the least that any of the three leaves.

Only a row's own values, in that order, go into its sums: a row keeps the same tokens alone and among others.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Weights: TypeAlias = NDArray[np.float32]
Ranks: TypeAlias = NDArray[np.uint64]
"""A token's place in the order as a number, small is good: its negated weight's bits, then its id. Never two alike."""

_ID_BITS = np.uint64(32)
_ID_MASK = np.uint64(0xFFFFFFFF)
_SIGN = np.uint32(1 << 31)


def truncate(
    weights: Weights, *, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> None:
    """weights [rows, vocab], in place: −inf for what is not kept; at least one token is.

    For each row ([rows] each): top_k ≤ 0 or ≥ vocab, top_p = 1 and min_p = 0 are off. Rows with all of them off are
    left alone.
    """
    vocab_size = weights.shape[1]
    limited = (top_k > 0) & (top_k < vocab_size)
    sorts_all = ~limited & ((top_p < 1) | (min_p > 0))
    for rows, counts in ((limited, top_k), (sorts_all, np.full_like(top_k, vocab_size))):
        if rows.any():
            weights[rows] = _truncated(weights[rows], counts=counts[rows], top_p=top_p[rows], min_p=min_p[rows])


def _truncated(
    weights: Weights, *, counts: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> Weights:
    """`counts`: how many tokens top-k leaves."""
    ranks = ranks_of(weights)
    best = best_ranks(ranks, int(counts.max()))
    values = np.take_along_axis(weights, ids_of(best), axis=1)
    rows = np.arange(len(weights))
    if (top_p < 1).any():
        shares = np.cumsum(np.exp(values.astype(np.float64) - values[:, :1]), axis=1)
        wanted = top_p * shares[rows, counts - 1]
        reaching = np.count_nonzero(shares < wanted[:, None], axis=1) + 1
        counts = np.where(top_p < 1, np.minimum(counts, reaching), counts)
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):  # log 0, where it is off
            floor = values[:, 0] + np.log(min_p).astype(np.float32)
        counts = np.minimum(counts, np.count_nonzero(values >= floor[:, None], axis=1))
    return np.where(ranks > best[rows, counts - 1, None], np.float32(-np.inf), weights)


def ranks_of(weights: Weights) -> Ranks:
    """[rows, vocab] uint64. The weights are numbers, or −inf."""
    bits = (weights + np.float32(0)).view(np.uint32)  # no −0
    signs = (bits.view(np.int32) >> 31).view(np.uint32)  # all ones below 0
    bits ^= ~(signs | _SIGN)  # falls as the weight rises
    ranks = bits.astype(np.uint64)
    ranks <<= _ID_BITS
    ranks |= np.arange(weights.shape[1], dtype=np.uint64)
    return ranks


def best_ranks(ranks: Ranks, count: int) -> Ranks:
    """[rows, min(count, vocab)]: the first of each row, in order. `count` > 0."""
    if count < ranks.shape[1]:
        ranks = np.partition(ranks, count - 1, axis=1)[:, :count]
    return np.sort(ranks, axis=1)


def ids_of(ranks: Ranks) -> NDArray[np.int64]:
    return (ranks & _ID_MASK).astype(np.int64)
