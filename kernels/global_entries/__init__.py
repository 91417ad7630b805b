"""From the compressor's projections to entries of global KV and their index keys, where the caches keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import FP4_BLOCK16, MXFP4_BLOCK32

from . import reference

__all__ = ["keep_raw_rows", "write_global_entries"]


def write_global_entries(
    raw: Tensor,
    ring: Tensor | None,
    earlier: Tensor | None,
    norm: Tensor,
    key_weight: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    destinations: Tensor,
    entries: Tensor,
    keys: Tensor,
    *,
    eps: float,
) -> None:
    """Pool the group that ends with each row, normalise, and write its entry and its index key.

    raw          [rows, 2 · width] float32: values and gate scores of a row, or with groups of one row [rows, width]
    ring         [places, 2 · width] float32: raw rows of earlier forwards; None with groups of one row
    earlier      [rows, ratio - 1] int32: the group's other rows, oldest first: n >= 0 is row n of `raw`, below 0 it is
                 place -1 - n of the ring
    norm [width], key_weight [key_width, width], key_norm [key_width]: in the dtype of the network
    cos, sin     [rows, pairs] float32, of the group's first position
    destinations [rows] int32: rows of both pools, all different; -1: no group ends here
    entries      [pool, record_bytes] uint8, `FP4_BLOCK16`; keys [pool, record_bytes] uint8, `MXFP4_BLOCK32`

    What is pooled is rounded to the dtype of `key_weight`, as are the results of the norms, the product and the turn.
    """
    rows, width = raw.shape[0], norm.shape[0]
    grouped = ring is not None and earlier is not None
    assert raw.shape[1] == (2 * width if grouped else width), (raw.shape, norm.shape)
    assert destinations.shape == (rows,) and cos.shape == sin.shape and cos.shape[0] == rows, (rows, cos.shape)
    assert entries.shape[1] == FP4_BLOCK16.record_bytes(width), (entries.shape, width)
    assert keys.shape[1] == MXFP4_BLOCK32.record_bytes(key_norm.shape[0]), (keys.shape, key_norm.shape)
    arguments = (raw, ring, earlier, norm, key_weight, key_norm, cos, sin, destinations, entries, keys)
    if not raw.is_cuda or key_weight.dtype != torch.bfloat16:
        if raw.is_cuda:
            note_fallback("write_global_entries", f"weights are {key_weight.dtype}")
        reference.write_global_entries(*arguments, eps=eps)
        return
    from .triton_kernel import write_global_entries as on_gpu

    on_gpu(*arguments, eps=eps)


def keep_raw_rows(raw: Tensor, places: Tensor, ring: Tensor) -> None:
    """Copy raw [rows, width] to rows of `ring` [.., width] in its dtype; places [rows] int32 all different, -1: not
    kept. Rows that a group of this forward still takes from the ring must have been taken."""
    assert places.shape == raw.shape[:1] and ring.shape[1] == raw.shape[1], (raw.shape, places.shape, ring.shape)
    if not raw.is_cuda:
        reference.keep_raw_rows(raw, places, ring)
        return
    from .triton_kernel import keep_raw_rows as on_gpu

    on_gpu(raw, places, ring)
