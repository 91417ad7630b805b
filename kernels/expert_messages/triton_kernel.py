"""Messages in Triton, for bfloat16 rows that travel in FP8: nothing waits for the host, so that a graph can hold it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import chunk_of, e4m3_bytes, e4m3_values, power_of_two, power_of_two_exponent

from .layout import MessageLayout

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(1e-4 / 448.0)
FIRST_SLOT = tl.constexpr(4)


@triton.jit
def route_kernel(
    ids,
    ranks,
    slots,
    counts,
    messages,
    places,
    pairs,
    chosen,
    source,
    replicas,
    room,
    message_ints,
    PAIRS: tl.constexpr,
):
    """Program (receiver): heads of its message, and the places of its pairs, in the order of rows and choices."""
    receiver = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    there = pair < pairs
    expert = tl.load(ids + pair, mask=there, other=0)
    replica = expert * replicas + (pair // chosen + source) % tl.load(counts + expert)
    mine = there & (tl.load(ranks + replica) == receiver)
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    head = messages + receiver.to(tl.int64) * message_ints
    tl.store(places + pair, (receiver * room + place).to(tl.int64), mask=mine)
    tl.store(head + FIRST_SLOT + place, tl.load(slots + replica).to(tl.int32), mask=mine)
    tl.store(head, tl.sum(mine.to(tl.int32), 0))


@triton.jit
def pack_kernel(x, places, messages, width, chosen, room, message_bytes, body_start, row_bytes, BLOCK: tl.constexpr):
    """Program (pair, piece of the row): its record."""
    pair = tl.program_id(0)
    place = tl.load(places + pair)
    record = messages + (place // room) * message_bytes + body_start + (place % room) * row_bytes
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (pair // chosen).to(tl.int64)
    grouped = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    grouped = grouped.reshape(BLOCK // GROUP, GROUP)
    exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 1) / 448.0, TARGET_MIN))
    codes = e4m3_bytes(tl.clamp(grouped * power_of_two(254 - exponent)[:, None], -448.0, 448.0))
    tl.store(record + column, codes.reshape(BLOCK), mask=column < width)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(record + width + group, exponent.to(tl.uint8), mask=group < width // GROUP)


@triton.jit
def unpack_kernel(
    messages, heads, rows, slots, absent, width, room, message_bytes, body_start, row_bytes, BLOCK: tl.constexpr
):
    """Program (place, piece of the row). `heads`: the messages as int32."""
    place = tl.program_id(0)
    sender = (place // room).to(tl.int64)
    within = place % room
    head = heads + sender * (message_bytes // 4)
    there = within < tl.load(head)
    if tl.program_id(1) == 0:
        slot = tl.load(head + FIRST_SLOT + within, mask=there, other=0)
        tl.store(slots + place, tl.where(there, slot, absent).to(tl.int64))
    if there:
        record = messages + sender * message_bytes + body_start + within.to(tl.int64) * row_bytes
        _decode(record, rows + place.to(tl.int64) * width, width, BLOCK)


@triton.jit
def decode_kernel(records, rows, width, row_bytes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _decode(records + row * row_bytes, rows + row * width, width, BLOCK)


@triton.jit
def _decode(record, row, width, BLOCK: tl.constexpr):
    """Piece `program_id(1)` of one record."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(record + column, mask=column < width, other=0).to(tl.int32)
    size = e4m3_values(codes & 0x7F)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    scale = power_of_two(tl.load(record + width + group, mask=group < width // GROUP, other=0).to(tl.int32))
    value = tl.where((codes & 0x80) != 0, -size, size).reshape(BLOCK // GROUP, GROUP) * scale[:, None]
    tl.store(row + column, value.reshape(BLOCK), mask=column < width)


@triton.jit
def gather_sum_kernel(outputs, places, weights, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, piece of it)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        place = tl.load(places + row * CHOSEN + choice)
        part = tl.load(outputs + place * width + column, mask=column < width, other=0.0)
        total += part * tl.load(weights + row * CHOSEN + choice)
    tl.store(out + row * width + column, total, mask=column < width)


def pack(
    x: Tensor, ids: Tensor, table: tuple[Tensor, Tensor, Tensor], layout: MessageLayout, *, source: int, size: int
) -> tuple[Tensor, Tensor]:
    """As `whalepod.kernels.expert_messages.pack`, on a GPU, or in Triton's interpreter."""
    ranks, slots, counts = table
    rows, chosen = ids.shape
    messages = torch.empty(size, layout.message_bytes, dtype=torch.uint8, device=x.device)
    places = torch.empty(rows, chosen, dtype=torch.int64, device=x.device)
    pairs = rows * chosen
    route_kernel[(size,)](
        ids.contiguous(),
        ranks,
        slots,
        counts,
        messages.view(torch.int32),
        places,
        pairs,
        chosen,
        source,
        ranks.shape[1],
        layout.places,
        layout.message_bytes // 4,
        PAIRS=max(32, triton.next_power_of_2(pairs)),
        num_warps=8,
    )
    _write_records(x, places, chosen, messages, layout)
    return messages, places


def encode(x: Tensor) -> Tensor:
    """x [rows, width] -> `FP8_BLOCK32` records [rows, width + width / 32] uint8."""
    rows, width = x.shape
    records = torch.empty(rows, width + width // 32, dtype=torch.uint8, device=x.device)
    if rows:
        block = chunk_of(width)
        places = torch.arange(rows, device=x.device)
        pack_kernel[(rows, triton.cdiv(width, block))](
            x.contiguous(), places, records, width, 1, rows, 0, 0, records.shape[1], BLOCK=block, num_warps=2
        )
    return records


def decode(records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The other way."""
    rows = torch.empty(len(records), width, dtype=dtype, device=records.device)
    if len(records):
        block = chunk_of(width)
        decode_kernel[(len(records), triton.cdiv(width, block))](
            records.contiguous(), rows, width, records.shape[1], BLOCK=block, num_warps=2
        )
    return rows


def _write_records(x: Tensor, places: Tensor, chosen: int, messages: Tensor, layout: MessageLayout) -> None:
    if places.numel() == 0:
        return
    block = chunk_of(layout.width)
    pack_kernel[(places.numel(), triton.cdiv(layout.width, block))](
        x.contiguous(),
        places,
        messages,
        layout.width,
        chosen,
        layout.places,
        layout.message_bytes,
        layout.body_start,
        layout.row_bytes,
        BLOCK=block,
        num_warps=2,
    )


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    """As `whalepod.kernels.expert_messages.unpack`, for the same."""
    places = len(messages) * layout.places
    rows = torch.empty(places, layout.width, dtype=layout.dtype, device=messages.device)
    slots = torch.empty(places, dtype=torch.int64, device=messages.device)
    block = chunk_of(layout.width)
    unpack_kernel[(places, triton.cdiv(layout.width, block))](
        messages,
        messages.view(torch.int32),
        rows,
        slots,
        absent,
        layout.width,
        layout.places,
        layout.message_bytes,
        layout.body_start,
        layout.row_bytes,
        BLOCK=block,
        num_warps=2,
    )
    return rows, slots


def gather_sum(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """As `whalepod.kernels.expert_messages.gather_sum`, for the same."""
    rows, chosen = places.shape
    width = outputs.shape[1]
    out = torch.empty(rows, width, dtype=torch.float32, device=outputs.device)
    if rows:
        block = chunk_of(width)
        # A product and a sum rounded once would differ from `combine_outputs`, which rounds both.
        unfused = {"enable_fp_fusion": False} if outputs.is_cuda else {}
        gather_sum_kernel[(rows, triton.cdiv(width, block))](
            outputs, places, weights.contiguous(), out, width, CHOSEN=chosen, BLOCK=block, num_warps=4, **unfused
        )
    return out
