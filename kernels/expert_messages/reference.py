"""Messages in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kernels.experts import combine_outputs

from .layout import ABSENT, MessageLayout, aligned_view


def pack(
    x: Tensor, ids: Tensor, table: tuple[Tensor, Tensor, Tensor], layout: MessageLayout, *, source: int, size: int
) -> tuple[Tensor, Tensor]:
    ranks, slots, counts = table
    replica = (torch.arange(len(ids), device=ids.device).unsqueeze(1) + source) % counts[ids]
    receiver = ranks[ids, replica]
    heads = torch.full((size, layout.body_start // 4), ABSENT, dtype=torch.int32, device=x.device)
    pair = torch.arange(ids.numel(), device=ids.device)
    heads[receiver.flatten(), pair] = slots[ids, replica].flatten().to(torch.int32)
    messages = torch.zeros(size, layout.message_bytes, dtype=torch.uint8, device=x.device)
    messages[:, : layout.body_start] = heads.view(torch.uint8)
    _body(messages, layout)[:, : len(x)] = encode(x, layout)
    return messages, receiver * layout.pairs + pair.view(ids.shape)


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    heads = messages[:, : layout.body_start].contiguous().view(torch.int32)
    slots = heads[:, : layout.pairs].flatten().to(torch.int64)
    rows = decode(_body(messages, layout).reshape(-1, layout.row_bytes), layout)
    return rows, slots.masked_fill(slots == ABSENT, absent)


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
    """[size, rows, row_bytes], a view."""
    end = layout.body_start + layout.rows * layout.row_bytes
    return messages[:, layout.body_start : end].unflatten(1, (layout.rows, layout.row_bytes))
