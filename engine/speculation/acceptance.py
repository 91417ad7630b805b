"""Which drafts stand, and what is said after them (`runtime.md` §2.6). Arrays only, many requests at once.

A request that verifies v drafts has v + 1 consecutive rows; row i judges draft i + 1, the last row none. `first`
[requests] are the requests' first rows.

Rejection: draft x, drawn from q, stands with probability min(1, p(x) / q(x)); at the first that does not, a token of
max(p − q, 0) is drawn instead, and behind the last draft one of p. What is emitted has the law p whatever q was.
Coupled: every row draws its token as if there were no drafts, and a draft stands if it is that token. What is emitted
is then a function of the noise alone, drafts or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Probabilities = NDArray[np.floating[Any]]


def passes(p_of_draft: Probabilities, q_of_draft: Probabilities, coins: Probabilities) -> NDArray[np.bool_]:
    """[drafts] whether each would stand, had all before it stood. `coins` in (0, 1)."""
    assert (q_of_draft > 0).all(), "a draft was drawn that could not be"
    return coins * q_of_draft < p_of_draft


def count_leading(stands: NDArray[np.bool_], first: Rows) -> Rows:
    """[requests] drafts accepted. `stands` [rows]: whether the draft that a row judges stands; False in last rows."""
    if not len(first):
        return np.zeros(0, np.int64)
    row = np.arange(len(stands))
    return np.minimum.reduceat(np.where(stands, len(stands), row), first) - first


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """[…, vocab] what to draw from where a draft from q did not stand, not normalised. Rows in which rounding has left
    nothing are p."""
    left = np.maximum(p - q, 0)
    return np.where(left.sum(axis=-1, keepdims=True) > 0, left, p)
