"""Counter-based noise: the same key, position and token give the same number on any rank, in any batch, after any
failure.

    key      64 bits of the request
    counter  (lane // 4, position, sub, purpose), 32 bits each; output word lane % 4
    u        (word + 0.5) / 2^32, in (0, 1)

`position` is the absolute index of the token being drawn, `lane` a token id. Nothing here holds state (`runtime.md`
§4.4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TARGET_DRAW = 0
"""Purpose of the noise that draws a token of the target model. Purposes never share noise."""

_WORDS = 4
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Multipliers and Weyl increments of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = NDArray[np.uint64]
"""32-bit words, kept in 64 bits so that products do not overflow."""


def philox4x32(key: int, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of arrays of counters. `key` is 64 bits: its low half is the first key word."""
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = k0 + _WEYL[0] & 0xFFFFFFFF, k1 + _WEYL[1] & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(key: int, *, position: int, lanes: int, purpose: int = TARGET_DRAW, sub: int = 0) -> NDArray[np.float64]:
    """[lanes] float64 in the open interval (0, 1), for lanes 0, 1, …"""
    blocks = -(-lanes // _WORDS)
    position_words, sub_words, purpose_words = (np.full(blocks, word, np.uint64) for word in (position, sub, purpose))
    words = philox4x32(key, (np.arange(blocks, dtype=np.uint64), position_words, sub_words, purpose_words))
    interleaved: NDArray[Any] = np.stack(words, axis=1).reshape(-1)[:lanes]
    return (interleaved.astype(np.float64) + 0.5) * 2.0**-32


def gumbels(key: int, *, position: int, lanes: int, purpose: int = TARGET_DRAW, sub: int = 0) -> NDArray[np.float64]:
    """[lanes] float64 standard Gumbel noise: argmax(log-weight + noise) draws in proportion to the weights.

    The winning tail is u near 0, where u is resolved best.
    """
    u = uniforms(key, position=position, lanes=lanes, purpose=purpose, sub=sub)
    return -np.log(-np.log1p(-u))
