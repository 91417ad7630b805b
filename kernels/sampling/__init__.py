"""The sampling head on a device: edits of logits, and tokens drawn from them by truncated Gumbel-max, without sorting
a vocabulary.

What a token is drawn by, and every tie, is as in `engine/sampling.py`. Rows for which rounding could decide, or whose
kept tokens are not among the best CANDIDATES, are reported as unsure: their tokens are drawn by that module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback

from . import reference

__all__ = ["CANDIDATES", "Edits", "Limits", "Noise", "apply_edits", "apply_masks", "draw", "draw_kept", "log_sums"]

CANDIDATES = 1024
"""Tokens, best first, among which top-k, top-p and min-p look for where to end."""


class Noise(NamedTuple):
    """What the noise of each row is keyed by (`engine/noise.py`, purpose 0, sub 0)."""

    keys: Tensor
    """[rows] int64, 64 bits."""
    positions: Tensor
    """[rows] int64, below 2^32."""


class Limits(NamedTuple):
    """What each row keeps."""

    top_k: Tensor
    """[rows] int64, 1 … vocab; vocab: off."""
    top_p: Tensor
    """[rows] float64, 1: off."""
    log_min_p: Tensor
    """[rows] float32, −∞: off."""


class Edits(NamedTuple):
    """Changes of single logits, each (row, id) at most once."""

    places: Tensor
    """[2, edits] int64: row, id."""
    factors: Tensor
    """[3, edits] float32: bias, repetition penalty, what is subtracted. In this order."""


def apply_edits(weights: Tensor, edits: Edits) -> None:
    """weights [rows, vocab] float32, in place: w + bias; over the repetition penalty where that is positive, else times
    it; less what is subtracted. Each step rounded to float32."""
    assert edits.places.shape[1] == edits.factors.shape[1], (edits.places.shape, edits.factors.shape)
    if _on_gpu(weights):
        from . import triton_kernel

        return triton_kernel.apply_edits(weights, edits)
    return reference.apply_edits(weights, edits)


def apply_masks(weights: Tensor, rows: Tensor, words: Tensor) -> None:
    """weights [rows, vocab] float32, in place: −∞ in `rows` [masked] int64 wherever `words` [masked, ⌈vocab / 32⌉]
    int32 has no 1 (`engine/grammar/masks.py`)."""
    assert words.shape == (len(rows), -(-weights.shape[1] // 32)), (words.shape, rows.shape, weights.shape)
    if _on_gpu(weights):
        from . import triton_kernel

        return triton_kernel.apply_masks(weights, rows, words)
    return reference.apply_masks(weights, rows, words)


def draw(weights: Tensor, temperatures: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """weights [rows, vocab] float32, temperatures [rows] float32 -> ids [rows] int64 of the largest weight over
    temperature plus noise, lowest id among equals; unsure [rows] bool. Temperature 0: the largest weight."""
    if _on_gpu(weights):
        from . import triton_kernel

        return triton_kernel.draw(weights, temperatures, noise)
    return reference.draw(weights, temperatures, noise)


def draw_kept(weights: Tensor, temperatures: Tensor, noise: Noise, limits: Limits) -> tuple[Tensor, Tensor]:
    """As `draw`, of what top-k, top-p and min-p keep of each row; no temperature is 0. Overwrites `weights`, which are
    divided by their temperatures."""
    if _on_gpu(weights):
        from . import triton_kernel

        return triton_kernel.draw_kept(weights, temperatures, noise, limits, candidates=CANDIDATES)
    return reference.draw_kept(weights, temperatures, noise, limits)


def log_sums(logits: Tensor) -> Tensor:
    """logits [rows, vocab] float32 -> [rows] float64: log Σ exp, within 1e-12 of the true one's magnitude and 1."""
    if _on_gpu(logits):
        from . import triton_kernel

        return triton_kernel.log_sums(logits)
    return reference.log_sums(logits)


def _on_gpu(weights: Tensor) -> bool:
    if weights.is_cuda and (weights.dtype != torch.float32 or weights.stride(1) != 1):
        note_fallback("sampling", f"weights are {weights.dtype}")
        return False
    return weights.is_cuda
