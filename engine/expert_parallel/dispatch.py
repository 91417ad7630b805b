"""One layer's exchange: rows to the ranks that hold their experts, what the experts made of them back, and the sum.

    normal        sizes are exchanged first, and messages are as large as they must be
    low latency   messages have one size, known beforehand; between GPUs of one machine they are not exchanged, but
                  written to where they are read, and of their bytes only those that say something

In both a row goes once to each rank, however many of its experts are there. Both give the same bits: an expert's output
for a row depends on neither, and a row's own rank sums them in the order of its choices. Inputs of quantised experts
travel as they are rounded there, in FP8, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.expert_messages import (
    Inboxes,
    MessageLayout,
    aligned_view,
    decode,
    encode,
    gather_sum,
    pack,
    put_outputs,
    put_rows,
    travels_in_triton,
    unpack,
)
from whalepod.kernels.experts import combine_outputs, expert_outputs
from whalepod.kernels.numerics import wide_dtype

from .expert_bank import LayerExperts
from .peer_memory import PeerMemory
from .placement import Placement
from .transport import Transport

Ints = NDArray[np.int64]

COUNT_BYTES = 16
"""Two int64: rows and pairs."""
PAIR_BYTES = 8
"""Two int32: a row of the message, a slot of the receiver."""


class DispatchMode(Enum):
    """Never mixed within one step: the ranks agree on it."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


@dataclass(frozen=True, slots=True)
class Arrived:
    """What low-latency messages brought."""

    layout: MessageLayout
    rows: Tensor
    """[ranks · layout.rows, D]; those without a slot are left open."""
    slots: Tensor
    """[ranks · layout.pairs] int64, the number of slots for pairs of other ranks."""
    places: Tensor | None
    """Where this rank's own outputs come back, [rows, chosen] int64; None: each at its pair."""


class Dispatcher:
    """For the layers of one rank over one transport.

    On a GPU the low-latency mode never waits for the device; the normal one does once a layer, for the sizes.
    """

    def __init__(self, transport: Transport, *, rows_limit: int, chosen_max: int, share_memory: bool = True) -> None:
        """Low-latency messages hold at most `rows_limit` rows of at most `chosen_max` experts. `share_memory`: where
        devices can."""
        self._transport = transport
        self._rows_limit = rows_limit
        self._chosen_max = chosen_max
        self._tried_to_share = not share_memory
        self._memory: PeerMemory | None = None
        self._inboxes: Inboxes | None = None

    @property
    def shares_memory(self) -> bool:
        """Low-latency messages have been written to where they are read."""
        return self._memory is not None

    def run(
        self,
        experts: LayerExperts,
        placement: Placement,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        mode: DispatchMode,
        rows_max: int,
    ) -> Tensor:
        """x [rows, D] -> Σ_k weights_k · expert_k(x) [rows, D] in at least float32. Also without rows: others may have
        some for this rank. `rows_max`: the agreed most that any rank sends."""
        assert len(x) <= rows_max, f"{len(x)} rows, but the ranks agreed on {rows_max}"
        width, packed = x.shape[1], experts.shape.input_format
        weights = weights.to(wide_dtype(x.dtype))
        if mode is DispatchMode.NORMAL:
            receivers, slots = placement.choose(ids, source=self._transport.rank)
            form = MessageLayout(0, ids.shape[1], width, x.dtype, packed)
            return combine_outputs(self._normal(experts, form, x, receivers, slots), weights)
        arrived = self.send_rows(experts, placement, x, ids, rows_max=rows_max)
        outputs = compute_arrived(experts, arrived)
        return self.return_outputs(arrived, outputs, weights, absent=len(experts.slots))

    def _normal(
        self, experts: LayerExperts, form: MessageLayout, x: Tensor, receivers: Tensor, slots: Tensor
    ) -> Tensor:
        """receivers and slots [rows, chosen] int64 -> outputs [rows, chosen, D]"""
        size, chosen = self._transport.size, receivers.shape[1]
        going = (receivers.unsqueeze(2) == torch.arange(size, device=x.device)).any(dim=1)  # [rows, receivers]
        place = going.cumsum(0) - 1  # of a row in the message to a receiver
        order = receivers.flatten().argsort(stable=True)  # by receiver, then by row and choice
        row, receiver = order.div(chosen, rounding_mode="floor"), receivers.flatten()[order]
        heads = torch.stack((place[row, receiver], slots.flatten()[order]), dim=1).to(torch.int32)
        pairs = (receivers.flatten().unsqueeze(1) == torch.arange(size, device=x.device)).sum(0)
        counts, theirs = self._exchange_counts(torch.stack((going.sum(0), pairs), dim=1))
        rows = encode(x, form)[going.t().nonzero()[:, 1]].split(counts[:, 0].tolist())
        parts = [
            raw_bytes(part) for both in zip(rows, heads.split(counts[:, 1].tolist()), strict=True) for part in both
        ]
        per_row = np.array([form.row_bytes, PAIR_BYTES])
        received = self._transport.exchange(torch.cat(parts), (counts @ per_row).tolist(), (theirs @ per_row).tolist())
        parts = received.split([int(n) for n in (theirs * per_row).flatten()])
        rows_before = np.cumsum(theirs[:, 0]) - theirs[:, 0]
        heads = [aligned_view(part, torch.int32).view(-1, 2).to(torch.int64) for part in parts[1::2]]
        records = torch.cat(parts[::2]).view(-1, form.row_bytes)
        outputs = _compute(
            experts,
            decode(records, form),
            torch.cat([head[:, 0] + int(before) for head, before in zip(heads, rows_before, strict=True)]),
            torch.cat([head[:, 1] for head in heads]),
        )
        width = outputs.shape[1] * outputs.element_size()
        back = self._transport.exchange(
            raw_bytes(outputs), (theirs[:, 1] * width).tolist(), (counts[:, 1] * width).tolist()
        )
        by_choice = torch.empty(len(order), outputs.shape[1], dtype=outputs.dtype, device=x.device)
        by_choice[order] = aligned_view(back, outputs.dtype).view(-1, outputs.shape[1])
        return by_choice.unflatten(0, receivers.shape)

    def _exchange_counts(self, counts: Tensor) -> tuple[Ints, Ints]:
        """counts [receivers, 2] int64 of rows and pairs -> the same on the host, and what each sender has for this
        rank."""
        each = [COUNT_BYTES] * self._transport.size
        received = self._transport.exchange(raw_bytes(counts), each, each)
        self._transport.settle()
        both = torch.cat((counts, aligned_view(received, torch.int64).view(-1, 2))).cpu().numpy()
        return both[: len(counts)], both[len(counts) :]

    def send_rows(
        self, experts: LayerExperts, placement: Placement, x: Tensor, ids: Tensor, *, rows_max: int
    ) -> Arrived:
        """The low-latency way to the experts."""
        layout = MessageLayout(rows_max, ids.shape[1], x.shape[1], x.dtype, experts.shape.input_format)
        rank, size, absent = self._transport.rank, self._transport.size, len(experts.slots)
        table = placement.table_on(x.device)
        inboxes = self._shared_inboxes(layout, x.device)
        if inboxes is not None and self._memory is not None:
            put_rows(x, ids, table, layout, inboxes, source=rank)
            self._memory.meet()
            return Arrived(layout, *unpack(inboxes.messages(layout), layout, absent=absent), places=None)
        messages, places = pack(x, ids, table, layout, source=rank, size=size)
        each = [layout.message_bytes] * size
        received = self._transport.exchange(messages.flatten(), each, each).view(size, -1)
        return Arrived(layout, *unpack(received, layout, absent=absent), places=places)

    def return_outputs(self, arrived: Arrived, outputs: Tensor, weights: Tensor, *, absent: int) -> Tensor:
        """And back: outputs [ranks · layout.pairs, D] of what arrived, and the weights of this rank's own rows, both
        in at least float32."""
        layout = arrived.layout
        if arrived.places is None:
            inboxes, memory = self._inboxes, self._memory
            assert inboxes is not None
            assert memory is not None
            put_outputs(outputs, arrived.slots, layout, inboxes, absent=absent)
            memory.meet()
            back = inboxes.outputs(layout)[: weights.numel()]
            return combine_outputs(back.view(*weights.shape, layout.width), weights)
        each = [layout.pairs * outputs.shape[1] * outputs.element_size()] * self._transport.size
        back = self._transport.exchange(raw_bytes(outputs), each, each)
        return gather_sum(aligned_view(back, outputs.dtype).view(-1, outputs.shape[1]), arrived.places, weights)

    def _shared_inboxes(self, layout: MessageLayout, device: torch.device) -> Inboxes | None:
        """Memory that ranks write to, if they can: asked for once, by all ranks, before their first messages."""
        if not self._tried_to_share and device.type == "cuda" and travels_in_triton(layout):
            self._tried_to_share = True
            most = replace(layout, rows=self._rows_limit, chosen=self._chosen_max)
            outputs_start, total = Inboxes.room(most, self._transport.size)
            self._memory = memory = self._transport.share_memory(total)
            self._inboxes = None if memory is None else Inboxes(memory.addresses, memory.own, outputs_start)
        return self._inboxes


def compute_arrived(experts: LayerExperts, arrived: Arrived) -> Tensor:
    """[ranks · layout.pairs, D], of which pairs without a slot are left open."""
    rows, slots, chosen = arrived.rows, arrived.slots, arrived.layout.chosen
    if rows.is_cuda:  # to leave pairs out, the host would have to know them
        return _compute(experts, rows, torch.arange(len(slots), device=slots.device) // chosen, slots)
    (there,) = (slots < len(experts.slots)).nonzero(as_tuple=True)
    outputs = _compute(experts, rows, there // chosen, slots[there])
    placed = outputs.new_zeros(len(slots), outputs.shape[1])
    placed[there] = outputs
    return placed


def _compute(experts: LayerExperts, rows: Tensor, pair_rows: Tensor, pair_slots: Tensor) -> Tensor:
    """[pairs, D] in at least float32."""
    if len(pair_rows) == 0:
        return rows.new_zeros(0, experts.down.shape[1], dtype=wide_dtype(rows.dtype))
    return expert_outputs(
        rows,
        pair_rows,
        pair_slots,
        experts.gate_up,
        experts.down,
        limit=experts.shape.limit,
        input_format=experts.shape.input_format,
    )


def raw_bytes(values: Tensor) -> Tensor:
    """The memory of a tensor, flat, uint8."""
    return values.contiguous().view(torch.uint8).flatten()


def mode_for(rows_max: int, *, prompts: bool, rows_limit: int) -> DispatchMode:
    """What a step of these rows uses: every rank must come to the same answer."""
    return DispatchMode.NORMAL if prompts or rows_max > rows_limit else DispatchMode.LOW_LATENCY


def graph_tier(rows: int, tiers: Sequence[int]) -> int:
    """The least tier that holds so many rows, or the rows themselves above the last one."""
    return next((tier for tier in tiers if tier >= rows), rows)
