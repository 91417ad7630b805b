"""Messages of one size between ranks that share experts: rows go to their experts' ranks, outputs come back.

    pack ─▶ one message for each rank ─▶ unpack ─▶ experts ─▶ outputs, one for each place ─▶ gather_sum

A message is 16 bytes, the number of rows as int32 in their front; a slot (int32) for each place; padding to 16 bytes;
a record for each place; padding to 16 bytes. The number of places is known beforehand, so nothing waits for a size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import FP8_BLOCK32, PackedFormat

from . import reference
from .layout import MessageLayout, aligned_view

__all__ = ["MessageLayout", "aligned_view", "decode", "encode", "gather_sum", "pack", "unpack"]


def encode(x: Tensor, layout: MessageLayout) -> Tensor:
    """x [rows, width] -> [rows, layout.row_bytes] uint8."""
    if _in_triton(x, layout.packed):
        from . import triton_kernel

        return triton_kernel.encode(x)
    return reference.encode(x, layout)


def decode(records: Tensor, layout: MessageLayout) -> Tensor:
    """The other way; exact."""
    if records.is_cuda and layout.dtype == torch.bfloat16 and layout.packed == FP8_BLOCK32:
        from . import triton_kernel

        return triton_kernel.decode(records, layout.width, layout.dtype)
    return reference.decode(records, layout)


def pack(
    x: Tensor, ids: Tensor, table: tuple[Tensor, Tensor, Tensor], layout: MessageLayout, *, source: int, size: int
) -> tuple[Tensor, Tensor]:
    """x [rows, width]; ids [rows, chosen] int64 of their experts; rank and slot of every expert's replicas [experts,
    replicas], and how many there are [experts], int64; `size` ranks, of which this is `source`
    -> messages [size, layout.message_bytes] uint8, and the place of every pair, receiver · layout.places + place in its
    message, [rows, chosen] int64.

    Of an expert's replicas the pair takes number (row + source) mod their count. A row goes once for each of its
    experts. Bytes behind a message's last row are left open.
    """
    if _in_triton(x, layout.packed):
        from . import triton_kernel

        return triton_kernel.pack(x, ids, table, layout, source=source, size=size)
    return reference.pack(x, ids, table, layout, source=source, size=size)


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    """messages [size, layout.message_bytes] uint8 -> rows [size · places, width] in layout.dtype, and their slots
    [size · places] int64, `absent` where a place is empty; what is in such a row is left open."""
    if messages.is_cuda and layout.dtype == torch.bfloat16 and layout.packed == FP8_BLOCK32:
        from . import triton_kernel

        return triton_kernel.unpack(messages, layout, absent=absent)
    return reference.unpack(messages, layout, absent=absent)


def gather_sum(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """outputs [places, D] and weights [rows, chosen], both in at least float32; places [rows, chosen] int64
    -> Σ_k weights_k · outputs[places_k] [rows, D], rounded and summed as `experts.combine_outputs` does."""
    assert places.shape == weights.shape, (places.shape, weights.shape)
    if outputs.is_cuda and outputs.dtype == torch.float32:
        from . import triton_kernel

        return triton_kernel.gather_sum(outputs, places, weights)
    return reference.gather_sum(outputs, places, weights)


def _in_triton(x: Tensor, packed: PackedFormat | None) -> bool:
    if x.is_cuda and (x.dtype != torch.bfloat16 or packed != FP8_BLOCK32):
        note_fallback("expert_messages", f"rows are {x.dtype}, and travel as {packed}")
        return False
    return x.is_cuda
