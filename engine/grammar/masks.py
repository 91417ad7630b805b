"""Masks over the vocabulary: token t is bit t % 32, from the lowest, of word t // 32, and 1 allows it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

MaskWords: TypeAlias = NDArray[np.uint32]
Flags: TypeAlias = NDArray[np.bool_]

_LITTLE = np.dtype("<u4")


def words(vocab_size: int) -> int:
    """Words of a row: the stride of every buffer of masks."""
    return -(-vocab_size // 32)


def allocate(rows: int, vocab_size: int) -> MaskWords:
    """[rows, words] uint32 that allow everything."""
    return np.full((rows, words(vocab_size)), 0xFFFFFFFF, _LITTLE)


def pack(allowed: NDArray[np.bool_]) -> MaskWords:
    """[…, vocab] bool to […, words] uint32; bits past the vocabulary are 0."""
    padding = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    return np.packbits(np.pad(allowed, padding), axis=-1, bitorder="little").view(_LITTLE)


def unpack(mask: MaskWords, vocab_size: int) -> Flags:
    """[…, words] uint32 to […, vocab] bool."""
    assert mask.shape[-1] == words(vocab_size), (mask.shape, vocab_size)
    octets: NDArray[Any] = mask.astype(_LITTLE, copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


def forbid(logits: NDArray[np.float32], mask: MaskWords) -> None:
    """logits [rows, vocab] float32, in place: −inf wherever `mask` [rows, words] has no 1."""
    np.copyto(logits, np.float32(-np.inf), where=~unpack(mask, logits.shape[-1]))
