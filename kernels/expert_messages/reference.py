"""Messages in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.experts import combine_outputs

from .layout import HEAD_BYTES, SLOT_BYTES, MessageLayout, aligned_view

FIRST_SLOT = HEAD_BYTES // SLOT_BYTES


def pack(
    x: Tensor, ids: Tensor, table: tuple[Tensor, Tensor, Tensor], layout: MessageLayout, *, source: int, size: int
) -> tuple[Tensor, Tensor]:
    ranks, slots, counts = table
    replica = (torch.arange(len(ids), device=ids.device).unsqueeze(1) + source) % counts[ids]
    receiver = ranks[ids, replica].flatten()
    going = (receiver.unsqueeze(1) == torch.arange(size, device=x.device)).to(torch.int32)  # [pairs, receivers]
    place = going.cumsum(0).gather(1, receiver.unsqueeze(1)).squeeze(1) - 1
    heads = torch.zeros(size, layout.body_start // SLOT_BYTES, dtype=torch.int32, device=x.device)
    heads[:, 0] = going.sum(0)
    heads[receiver, place + FIRST_SLOT] = slots[ids, replica].flatten().to(torch.int32)
    messages = torch.zeros(size, layout.message_bytes, dtype=torch.uint8, device=x.device)
    messages[:, : layout.body_start] = heads.view(torch.uint8)
    _body(messages, layout)[receiver, place] = encode(x, layout).repeat_interleave(ids.shape[1], dim=0)
    return messages, (receiver * layout.places + place).view(ids.shape)


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    heads = messages[:, : layout.body_start].contiguous().view(torch.int32)
    empty = torch.arange(layout.places, device=messages.device) >= heads[:, :1]
    slots = heads[:, FIRST_SLOT : FIRST_SLOT + layout.places].masked_fill(empty, absent)
    rows = decode(_body(messages, layout).reshape(-1, layout.row_bytes), layout)
    return rows, slots.flatten().to(torch.int64)


def encode(x: Tensor, layout: MessageLayout) -> Tensor:
    if layout.packed is not None:
        return layout.packed.encode(x)
    return x.contiguous().view(torch.uint8).view(len(x), layout.row_bytes)


def decode(records: Tensor, layout: MessageLayout) -> Tensor:
    if layout.packed is not None:
        return layout.packed.decode(records, layout.width, layout.dtype)
    return aligned_view(records, layout.dtype).view(len(records), layout.width)


def gather_sum(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return combine_outputs(outputs[places], weights)


def _body(messages: Tensor, layout: MessageLayout) -> Tensor:
    """[size, places, row_bytes], a view."""
    end = layout.body_start + layout.places * layout.row_bytes
    return messages[:, layout.body_start : end].unflatten(1, (layout.places, layout.row_bytes))
