"""Messages in Triton, for bfloat16 rows that travel in FP8: nothing waits for the host, so that a graph can hold it.

Where ranks write to each other's memory, kernels are given addresses as numbers; what is written to another device is
seen there after `meet_kernel`, whose signals are written behind it and read before what came.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.packing_kernel import chunk_of, e4m3_bytes, e4m3_values, power_of_two, power_of_two_exponent

from .layout import Inboxes, MessageLayout

GROUP = tl.constexpr(32)
TARGET_MIN = tl.constexpr(1e-4 / 448.0)
ABSENT = tl.constexpr(-1)
PROGRAMS_MAX = 1056
"""Of kernels that walk over pairs, most of which may be absent: eight for each multiprocessor of an H200."""
POLLS_BETWEEN_LOOKS = tl.constexpr(128)
"""At the host's memory, which is far."""


@triton.jit
def _pointer(addresses, index, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _message(messages, addresses, receiver, source, message_bytes, PEERS: tl.constexpr):
    if PEERS:
        return _pointer(addresses, receiver, tl.uint8) + source * message_bytes
    else:
        return messages + receiver * message_bytes


@triton.jit
def _record(x, row, width, BLOCK: tl.constexpr):
    """Piece `program_id(1)` of a row: codes [BLOCK] and exponent bytes [BLOCK / 32]."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grouped = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    grouped = grouped.reshape(BLOCK // GROUP, GROUP)
    exponent = power_of_two_exponent(tl.maximum(tl.max(tl.abs(grouped), 1) / 448.0, TARGET_MIN))
    codes = e4m3_bytes(tl.clamp(grouped * power_of_two(254 - exponent)[:, None], -448.0, 448.0))
    return codes.reshape(BLOCK), exponent.to(tl.uint8)


@triton.jit
def _store_record(record, codes, exponents, width, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(record + column, codes, mask=column < width)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(record + width + group, exponents, mask=group < width // GROUP)


@triton.jit
def pack_kernel(
    x,
    ids,
    ranks,
    slots,
    counts,
    messages,
    addresses,
    places,
    count,
    room,
    size,
    source,
    replicas,
    width,
    message_bytes,
    body_start,
    row_bytes,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, piece of it), for as many rows as there is room for: its record, and its pairs' slots. With PEERS
    messages begin `source` messages behind the receivers' `addresses`, and no places are written."""
    row = tl.program_id(0)
    choice = tl.arange(0, CHOICES)
    real = (choice < CHOSEN) & (row < count)
    expert = tl.load(ids + row * CHOSEN + choice, mask=real, other=0)
    replica = expert * replicas + (row + source) % tl.load(counts + expert)
    receiver = tl.where(real, tl.load(ranks + replica).to(tl.int32), -1)
    pair = row * CHOSEN + choice
    if tl.program_id(1) == 0:
        slot = tl.load(slots + replica).to(tl.int32)
        if not PEERS:
            tl.store(places + pair, (receiver * (room * CHOSEN) + pair).to(tl.int64), mask=real)
        for other in range(size):
            head = _message(messages, addresses, other, source, message_bytes, PEERS).to(tl.pointer_type(tl.int32))
            tl.store(head + pair, tl.where(receiver == other, slot, ABSENT), mask=choice < CHOSEN)
    if row < count:
        codes, exponents = _record(x, row.to(tl.int64), width, BLOCK)
        for number in tl.static_range(CHOSEN):
            other = tl.sum(tl.where(choice == number, receiver, 0), 0)
            sent = tl.sum(((choice < number) & (receiver == other)).to(tl.int32), 0)
            if sent == 0:
                message = _message(messages, addresses, other, source, message_bytes, PEERS)
                _store_record(message + body_start + row * row_bytes, codes, exponents, width, BLOCK)


@triton.jit
def encode_kernel(x, records, width, row_bytes, BLOCK: tl.constexpr):
    """Program (row, piece of it)."""
    row = tl.program_id(0).to(tl.int64)
    codes, exponents = _record(x, row, width, BLOCK)
    _store_record(records + row * row_bytes, codes, exponents, width, BLOCK)


@triton.jit
def unpack_kernel(
    messages,
    heads,
    rows,
    slots,
    absent,
    width,
    room,
    message_bytes,
    body_start,
    row_bytes,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sender and row, piece of it). `heads`: the messages as int32."""
    place = tl.program_id(0)
    sender = (place // room).to(tl.int64)
    row = place % room
    choice = tl.arange(0, CHOICES)
    own = heads + sender * (message_bytes // 4) + row * CHOSEN
    slot = tl.load(own + choice, mask=choice < CHOSEN, other=ABSENT)
    if tl.program_id(1) == 0:
        pair = place.to(tl.int64) * CHOSEN + choice
        tl.store(slots + pair, tl.where(slot == ABSENT, absent, slot).to(tl.int64), mask=choice < CHOSEN)
    if tl.max(slot, 0) != ABSENT:
        record = messages + sender * message_bytes + body_start + row.to(tl.int64) * row_bytes
        _decode(record, rows + place.to(tl.int64) * width, width, BLOCK)


@triton.jit
def put_outputs_kernel(outputs, slots, addresses, pairs, each, outputs_start, absent, width, BLOCK: tl.constexpr):
    """Program (one of several, piece of the row) walks over pairs: an output goes to the rank that has its row. `each`:
    pairs of a rank."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
        if tl.load(slots + pair) != absent:
            part = tl.load(outputs + tl.cast(pair, tl.int64) * width + column, mask=column < width)
            inbox = _pointer(addresses, pair // each, tl.uint8) + outputs_start
            there = inbox.to(tl.pointer_type(tl.float32)) + tl.cast(pair % each, tl.int64) * width
            tl.store(there + column, part, mask=column < width)


@triton.jit
def meet_kernel(signals, own, round_number, ended, rank, size, PEERS: tl.constexpr):
    """One program. Numbers of rounds wrap, so that only their differences count."""
    peer = tl.arange(0, PEERS)
    there = peer < size
    due = tl.load(round_number) + 1
    pads = tl.load(signals + peer, mask=there, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(pads + rank, peer * 0 + due, mask=there, sem="release", scope="sys")
    tl.store(round_number, due)
    behind, polls = due * 0 + 1, due * 0
    while behind > 0:
        seen = tl.atomic_add(own + peer, peer * 0, mask=there, sem="acquire", scope="sys")
        behind = tl.max(tl.where(there, due - seen, 0), 0)
        polls += 1
        if polls % POLLS_BETWEEN_LOOKS == 0:  # noqa: SIM102  the second condition is read from the host's memory
            if tl.load(ended, volatile=True) != 0:
                behind = due * 0


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
    messages = torch.empty(size, layout.message_bytes, dtype=torch.uint8, device=x.device)
    places = torch.empty(ids.shape, dtype=torch.int64, device=x.device)
    _pack(x, ids, table, layout, source=source, size=size, messages=messages, places=places, addresses=None)
    return messages, places


def put_rows(
    x: Tensor,
    ids: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    layout: MessageLayout,
    inboxes: Inboxes,
    *,
    source: int,
) -> None:
    """As `whalepod.kernels.expert_messages.put_rows`."""
    addresses = inboxes.addresses
    inboxes.messages(layout)  # asserts that there is room
    _pack(x, ids, table, layout, source=source, size=len(addresses), messages=None, places=None, addresses=addresses)


def _pack(
    x: Tensor,
    ids: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    layout: MessageLayout,
    *,
    source: int,
    size: int,
    messages: Tensor | None,
    places: Tensor | None,
    addresses: Tensor | None,
) -> None:
    ranks, slots, counts = table
    assert len(ids) <= layout.rows, (len(ids), layout.rows)
    assert ids.shape[1] == layout.chosen, (ids.shape, layout.chosen)
    block = chunk_of(layout.width)
    pack_kernel[(layout.rows, triton.cdiv(layout.width, block))](
        x.contiguous(),
        ids.contiguous(),
        ranks,
        slots,
        counts,
        messages,
        addresses,
        places,
        len(ids),
        layout.rows,
        size,
        source,
        ranks.shape[1],
        layout.width,
        layout.message_bytes,
        layout.body_start,
        layout.row_bytes,
        CHOSEN=layout.chosen,
        CHOICES=triton.next_power_of_2(layout.chosen),
        PEERS=addresses is not None,
        BLOCK=block,
        num_warps=2,
    )


def put_outputs(outputs: Tensor, slots: Tensor, layout: MessageLayout, inboxes: Inboxes, *, absent: int) -> None:
    """As `whalepod.kernels.expert_messages.put_outputs`."""
    inboxes.outputs(layout)  # asserts that there is room
    pairs, block = len(slots), chunk_of(layout.width)
    put_outputs_kernel[(min(pairs, PROGRAMS_MAX), triton.cdiv(layout.width, block))](
        outputs,
        slots,
        inboxes.addresses,
        pairs,
        layout.pairs,
        inboxes.outputs_start,
        absent,
        layout.width,
        BLOCK=block,
        num_warps=4,
    )


def meet(signals: Tensor, own: Tensor, round_number: Tensor, ended: Tensor, *, rank: int) -> None:
    """As `whalepod.kernels.expert_messages.meet`."""
    size = len(signals)
    meet_kernel[(1,)](signals, own, round_number, ended, rank, size, PEERS=triton.next_power_of_2(size), num_warps=1)


def encode(x: Tensor) -> Tensor:
    """x [rows, width] -> `FP8_BLOCK32` records [rows, width + width / 32] uint8."""
    rows, width = x.shape
    records = torch.empty(rows, width + width // 32, dtype=torch.uint8, device=x.device)
    if rows:
        block = chunk_of(width)
        encode_kernel[(rows, triton.cdiv(width, block))](
            x.contiguous(), records, width, records.shape[1], BLOCK=block, num_warps=2
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


def unpack(messages: Tensor, layout: MessageLayout, *, absent: int) -> tuple[Tensor, Tensor]:
    """As `whalepod.kernels.expert_messages.unpack`, for the same."""
    places = len(messages) * layout.rows
    rows = torch.empty(places, layout.width, dtype=layout.dtype, device=messages.device)
    slots = torch.empty(places * layout.chosen, dtype=torch.int64, device=messages.device)
    block = chunk_of(layout.width)
    unpack_kernel[(places, triton.cdiv(layout.width, block))](
        messages,
        messages.view(torch.int32),
        rows,
        slots,
        absent,
        layout.width,
        layout.rows,
        layout.message_bytes,
        layout.body_start,
        layout.row_bytes,
        CHOSEN=layout.chosen,
        CHOICES=triton.next_power_of_2(layout.chosen),
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
