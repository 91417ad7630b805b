"""Messages of one size between ranks that share experts: rows go to their experts' ranks, outputs come back.

    pack ─▶ a message for each rank ─▶ exchange ─▶ unpack ─▶ experts ─▶ an output for each pair ─▶ exchange ─▶ sum
    put_rows ─▶ in each rank's inbox ─▶ meet ─▶ unpack ─▶ experts ─▶ put_outputs ─▶ in inboxes ─▶ meet ─▶ sum

A *pair* is a row and one of its experts. A message is a slot of the receiver (int32, -1: none of its) for each pair,
padding to 16 bytes, a record for each row, padding to 16 bytes. A row goes once to each rank that has experts for it,
and lies at its own place, so that nothing is counted and nothing waits for a size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.quantise import FP8_BLOCK32, PackedFormat

from . import reference
from .layout import Inboxes, MessageLayout, aligned_view

__all__ = [
    "Inboxes", "MessageLayout", "aligned_view", "decode", "encode", "gather_sum", "meet", "pack", "put_outputs",
    "put_rows", "travels_in_triton", "unpack",
]  # fmt: skip


def encode(x: Tensor, layout: MessageLayout) -> Tensor:
    """x [rows, width] -> [rows, layout.row_bytes] uint8."""
    if _in_triton(x, layout.packed):
        from . import triton_kernel

        return triton_kernel.encode(x)
    return reference.encode(x, layout)


def decode(records: Tensor, layout: MessageLayout) -> Tensor:
    """The other way; exact."""
    if records.is_cuda and travels_in_triton(layout):
        from . import triton_kernel

        return triton_kernel.decode(records, layout.width, layout.dtype)
    return reference.decode(records, layout)


def pack(
    x: Tensor, ids: Tensor, table: tuple[Tensor, Tensor, Tensor], layout: MessageLayout, *, source: int, size: int
) -> tuple[Tensor, Tensor]:
    """x [rows, width]; ids [rows, chosen] int64 of their experts; rank and slot of every expert's replicas [experts,
    replicas], and how many there are [experts], int64; `size` ranks, of which this is `source`
    -> messages [size, layout.message_bytes] uint8, and where every pair's output comes back, receiver · layout.pairs +
    pair, [rows, chosen] int64.

    Of an expert's replicas the pair takes number (row + source) mod their count. Bytes of rows that do not go to a
    receiver are left open.
    """
    if _in_triton(x, layout.packed):
        from . import triton_kernel

        return triton_kernel.pack(x, ids, table, layout, source=source, size=size)
    return reference.pack(x, ids, table, layout, source=source, size=size)


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    """messages [size, layout.message_bytes] uint8 -> rows [size · layout.rows, width] in layout.dtype, and the slots of
    their pairs [size · layout.pairs] int64, `absent` for pairs of other ranks; a row that has no other pairs is left
    open."""
    if messages.is_cuda and travels_in_triton(layout):
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


def put_rows(
    x: Tensor,
    ids: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    layout: MessageLayout,
    inboxes: Inboxes,
    *,
    source: int,
) -> None:
    """What `pack` makes of the same goes to where the receivers' `Inboxes.messages` are. On a GPU, for layouts that
    travel in Triton."""
    from . import triton_kernel

    triton_kernel.put_rows(x, ids, table, layout, inboxes, source=source)


def put_outputs(outputs: Tensor, slots: Tensor, layout: MessageLayout, inboxes: Inboxes, *, absent: int) -> None:
    """outputs [size · layout.pairs, width] float32 of the pairs that `unpack` gave, and their slots -> each goes to
    where the `Inboxes.outputs` of the rank that has the row are, at its pair; nothing comes of those that are
    `absent`."""
    from . import triton_kernel

    triton_kernel.put_outputs(outputs, slots, layout, inboxes, absent=absent)


def meet(signals: Tensor, own: Tensor, round_number: Tensor, ended: Tensor, *, rank: int) -> None:
    """Queue that this device waits until all others have come as far: what they put before is then here.

    `signals` [ranks] int64, addresses of every rank's `own` [ranks] int32, which begin as zeros, as does `round_number`
    [1] int32; `ended` [1] int32 in the host's pinned memory: set it to let go of a device that waits.
    """
    from . import triton_kernel

    triton_kernel.meet(signals, own, round_number, ended, rank=rank)


def travels_in_triton(layout: MessageLayout) -> bool:
    """On a GPU."""
    return layout.dtype == torch.bfloat16 and layout.packed == FP8_BLOCK32


def _in_triton(x: Tensor, packed: PackedFormat | None) -> bool:
    if x.is_cuda and (x.dtype != torch.bfloat16 or packed != FP8_BLOCK32):
        note_fallback("expert_messages", f"rows are {x.dtype}, and travel as {packed}")
        return False
    return x.is_cuda
