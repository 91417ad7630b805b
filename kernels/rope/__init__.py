"""Rotary position embedding of the last channels of a vector, in interleaved pairs."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions [rows] int64, frequencies [pairs] float -> cos and sin [rows, pairs] of position · frequency.

    Angles are products in the dtype of `frequencies`.
    """
    assert (positions.ndim, frequencies.ndim) == (1, 1), (positions.shape, frequencies.shape)
    return reference.rotary_angles(positions, frequencies)


def rotary_factors(cos: Tensor, sin: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """cos, sin [rows, pairs] -> for vectors of `width` channels, of which the last 2 · pairs rotate: what a channel is
    multiplied with, and what its neighbour in the pair is, both [rows, width]."""
    assert cos.shape == sin.shape, (cos.shape, sin.shape)
    assert width >= 2 * cos.shape[1], (cos.shape, width)
    return reference.rotary_factors(cos, sin, width)


def rotate(x: Tensor, own: Tensor, neighbour: Tensor) -> Tensor:
    """Rotate x [rows, ..., width] by the factors of `rotary_factors`; negated `neighbour` factors turn back.

    Channels (2i, 2i+1) = (a, b) become (a cos - b sin, b cos + a sin). Calculated in at least float32 and rounded once
    to the dtype of `x`.
    """
    assert own.shape == neighbour.shape == (x.shape[0], x.shape[-1]), (x.shape, own.shape, neighbour.shape)
    if library.takes(x, own, neighbour):
        return native.rotate(x, own, neighbour)
    return reference.rotate(x, own, neighbour)
