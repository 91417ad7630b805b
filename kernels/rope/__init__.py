"""Rotary position embedding of the last channels of a vector, in interleaved pairs."""

from __future__ import annotations

from torch import Tensor

from . import reference


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [rows] int64, frequencies [pairs] float -> cos and sin [rows, pairs] of position · frequency.

    Angles are products in the dtype of `frequencies`.
    """
    assert positions.ndim == 1 and frequencies.ndim == 1, (positions.shape, frequencies.shape)
    return reference.rotary_angles(positions, frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2 · pairs channels of x [rows, ..., width]; cos, sin [rows, pairs].

    Channels (2i, 2i+1) = (a, b) become (a cos - b sin, b cos + a sin); `inverse` turns back. Calculated in at least
    float32 and rounded once to the dtype of `x`.
    """
    assert x.shape[0] == cos.shape[0] and cos.shape == sin.shape and x.shape[-1] >= 2 * cos.shape[-1], (x.shape, cos.shape)
    return reference.rotate(x, cos, sin, inverse=inverse)
