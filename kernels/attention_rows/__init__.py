"""What becomes of the rows that an attention layer's first products give: query latents are normalised, window rows and
entries of global KV go to the caches.

    x ─┬▶ wq_a ───────▶ norm ─────────────▶ query latents
       ├▶ wkv ────────▶ norm, turn, FP8 ──▶ window records
       └▶ compressor ─▶ pool, norm ─┬▶ turn, FP4 ──────────────▶ entries
                                    └▶ wk, norm, turn, MXFP4 ──▶ index keys

All three follow the same products, so one launch holds whichever of them a layer has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat

__all__ = ["EntryRows", "LatentRows", "WindowRows", "write_attention_rows"]


@dataclass(frozen=True, slots=True)
class LatentRows:
    rows: Tensor
    """[rows, width]; rows may lie apart."""
    norm: Tensor
    """[width]"""
    rounding: PackedFormat | None = None
    """What the matrices behind round their input to."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows that are normalised, whose last 2 · pairs channels are turned, and that become `FP8_BLOCK32` records."""

    rows: Tensor
    """[rows, width]; rows may lie apart."""
    norm: Tensor
    """[width]"""
    cos: Tensor
    sin: Tensor
    """[rows, pairs] float32"""
    destinations: Tensor
    """[rows] int32: rows of `pool`, all different; -1: not written."""
    pool: Tensor
    """[pool, record_bytes] uint8"""

    def __post_init__(self) -> None:
        count, width = self.rows.shape
        assert self.pool.shape[1] == FP8_BLOCK32.record_bytes(width), (self.pool.shape, width)
        assert self.norm.shape == (width,) and self.destinations.shape == (count,), (self.norm.shape, count)
        assert self.cos.shape == self.sin.shape and self.cos.shape[0] == count, (self.cos.shape, count)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Groups of rows that are pooled and normalised, and become entries and index keys. What is pooled is rounded to
    the dtype of `norm`, as are the results of the norms, the product and the turn."""

    raw: Tensor
    """[rows, 2 · width] float32: values and gate scores of a row; with groups of one row, which are in the order of
    rows, [rows, width]."""
    ring: Tensor | None
    """[places, 2 · width] float32: raw rows of earlier forwards, and of this one when it ends; None with groups of one
    row, as `members` and `keeps` are."""
    members: Tensor | None
    """[groups, ratio] int32, oldest first: n >= 0 is row n of `raw`, below 0 it is place -1 - n of the ring. Any row
    where there is no member yet. The last one is never in the ring."""
    keeps: Tensor | None
    """[groups, ratio] int32: the place of the ring that a member's row is kept at, or for a member from the ring, the
    row that its place is for once it has been read; -1: none. No place and no row twice."""
    norm: Tensor
    """[width]"""
    key_weight: Tensor
    """[key_width, width]"""
    key_norm: Tensor
    """[key_width]"""
    cos: Tensor
    sin: Tensor
    """[groups, pairs] float32, of the group's first position."""
    destinations: Tensor
    """[groups] int32: rows of both pools, all different; -1: the group does not end here, or is there already."""
    entries: Tensor
    """[pool, record_bytes] uint8, `FP4_BLOCK16`"""
    keys: Tensor
    """[pool, record_bytes] uint8, `MXFP4_BLOCK32`"""

    def __post_init__(self) -> None:
        width, groups = self.norm.shape[0], self.destinations.shape[0]
        assert (self.ring is None) == (self.members is None) == (self.keeps is None), "all of a ring, or nothing of it"
        assert self.raw.shape[1] == (width if self.ring is None else 2 * width), (self.raw.shape, width)
        assert self.cos.shape == self.sin.shape and self.cos.shape[0] == groups, (self.cos.shape, groups)
        assert self.members is not None or self.raw.shape[0] == groups, (self.raw.shape, groups)
        assert self.entries.shape[1] == FP4_BLOCK16.record_bytes(width), (self.entries.shape, width)
        assert self.keys.shape[1] == MXFP4_BLOCK32.record_bytes(self.key_norm.shape[0]), self.keys.shape

    def __len__(self) -> int:
        return len(self.destinations)

    @property
    def ratio(self) -> int:
        return 1 if self.members is None else self.members.shape[1]


def write_attention_rows(
    *, latents: LatentRows | None = None, window: WindowRows | None = None, entries: EntryRows | None = None, eps: float
) -> Tensor | None:
    """Write records of the window and of global KV, and return the normalised latents [rows, width], where there are
    any of these.

    On a GPU angles, destinations and weights are read while the kernel ahead may still run: that kernel must not be
    what writes them.
    """
    from . import reference  # which takes these classes

    given = [part for part in (latents, window, entries) if part is not None]
    norms = [part.norm for part in given]
    if not norms:
        return None
    if norms[0].is_cuda:
        refused = _refused(norms, latents)
        if refused is None:
            from .triton_kernel import write_attention_rows as on_gpu

            return on_gpu(latents, window, entries, eps=eps)
        note_fallback("write_attention_rows", refused)
    return reference.write_attention_rows(latents, window, entries, eps=eps)


def _refused(norms: list[Tensor], latents: LatentRows | None) -> str | None:
    """Why the kernel does not take them."""
    if any(norm.dtype != torch.bfloat16 for norm in norms):
        return f"weights are {', '.join(str(norm.dtype) for norm in norms)}"
    if latents is not None and latents.rounding not in (None, FP8_BLOCK32):
        return "latents are rounded to another format than FP8_BLOCK32"
    return None
