"""Counter-based noise: the same key, position and token give the same number on any rank, in any batch, after any
failure.

    key      64 bits of the request, and of which of its choices it is
    counter  (lane // 4, position, sub, purpose), 32 bits each; output word lane % 4
    u        (word + 0.5) / 2^32, in (0, 1)

`position` is the absolute index of the token being drawn, `lane` a token id. Nothing here holds state (`runtime.md`
§4.4).
"""

from __future__ import annotations

import struct
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

TARGET_DRAW = 0
"""Purpose of the noise that draws a token of the target model. Purposes never share noise."""
ACCEPT_COIN = 1
"""Purpose of the one number that decides whether the draft at a position stands."""
DRAFT_DRAW = 2
"""Purpose of the noise that draws a draft; `sub` is its column, because a position may be drafted more than once."""

_WORDS = 4
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Multipliers and Weyl increments of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10

ROUGH_ERROR = 0.4
"""log 22.9 - log 16.6, where u is rounded to the largest float32 below 1; elsewhere less."""
_BELOW_ONE = np.float32(1 - 2.0**-24)

Words = NDArray[np.uint64]
"""32-bit words, kept in 64 bits so that products do not overflow."""


def branch_key(key: int, branch: int) -> int:
    """64-bit key of choice `branch` of a request whose own key is `key`; choice 0 has that one."""
    if branch == 0:
        return key
    return int.from_bytes(sha256(b"whalepod branch" + struct.pack("<QI", key, branch)).digest()[:8], "little")


def philox4x32(key: Words, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of arrays of counters. `key` is 64 bits: its low half is the first key word. All arrays broadcast
    together."""
    k0, k1 = key & _MASK, key >> _SHIFT
    c0, c1, c2, c3 = (np.array(words, order="C") for words in np.broadcast_arrays(*counter, key)[:4])
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_ROUNDS):  # in place: fresh arrays would take twice the time of the arithmetic
        np.multiply(c0, _MULTIPLIERS[0], out=p0)
        np.multiply(c2, _MULTIPLIERS[1], out=p1)
        np.right_shift(p1, _SHIFT, out=c0)
        np.right_shift(p0, _SHIFT, out=c2)
        c0 ^= c1
        c2 ^= c3
        c0 ^= k0
        c2 ^= k1
        np.bitwise_and(p1, _MASK, out=c1)
        np.bitwise_and(p0, _MASK, out=c3)
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def noise_words(
    keys: Words, *, positions: Words, lanes: int, purpose: int | Words = TARGET_DRAW, sub: int | Words = 0
) -> NDArray[np.uint32]:
    """[rows, lanes] uint32, uniform, for lanes 0, 1, … of each row's key and position ([rows] uint64 each). So may be
    `purpose` and `sub`."""
    blocks = -(-lanes // _WORDS)
    counter = (
        np.arange(blocks, dtype=np.uint64)[None, :],
        positions[:, None],
        np.asarray(sub, np.uint64).reshape(-1, 1),
        np.asarray(purpose, np.uint64).reshape(-1, 1),
    )
    interleaved = np.empty((len(keys), blocks, _WORDS), np.uint32)
    for index, words in enumerate(philox4x32(keys[:, None], counter)):
        interleaved[:, :, index] = words
    return interleaved.reshape(len(keys), -1)[:, :lanes]


def uniforms(key: int, *, position: int, lanes: int, purpose: int = TARGET_DRAW, sub: int = 0) -> NDArray[np.float64]:
    """[lanes] float64 in the open interval (0, 1), for lanes 0, 1, …"""
    return uniform_of(_row(key, position, lanes, purpose, sub))


def gumbels(key: int, *, position: int, lanes: int, purpose: int = TARGET_DRAW, sub: int = 0) -> NDArray[np.float64]:
    """[lanes] float64 standard Gumbel noise: argmax(log-weight + noise) draws in proportion to the weights."""
    return gumbel_of(_row(key, position, lanes, purpose, sub))


def uniform_of(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def gumbel_of(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The winning tail is u near 0, where u is resolved best."""
    return -np.log(-np.log1p(-uniform_of(words)))


def rough_gumbel_of(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Within ROUGH_ERROR of `gumbel_of`, at a tenth of its cost: float32 resolves u near 1 badly."""
    u = words.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    np.minimum(u, _BELOW_ONE, out=u)
    np.negative(u, out=u)
    np.log1p(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


def _row(key: int, position: int, lanes: int, purpose: int, sub: int) -> NDArray[np.uint32]:
    keys, positions = np.array([key], np.uint64), np.array([position], np.uint64)
    return noise_words(keys, positions=positions, lanes=lanes, purpose=purpose, sub=sub)[0]
