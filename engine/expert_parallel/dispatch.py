"""One layer's exchange: rows to the ranks that hold their experts, what the experts made of them back, and the sum.

    normal        a row goes once to each rank, however many of its experts are there; sizes are exchanged first
    low latency   every message has the same size, known beforehand, and holds its own count; a row goes once per expert

Both give the same bits: an expert's output for a row depends on neither, and a row's own rank sums them in the order of
its choices. Inputs of quantised experts travel as they are rounded there, in FP8, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.experts import combine_outputs, expert_outputs
from whalepod.kernels.numerics import wide_dtype
from whalepod.kernels.quantise import PackedFormat

from .expert_bank import LayerExperts
from .placement import Placement
from .transport import Transport

Ints = NDArray[np.int64]

COUNT_BYTES = 16
"""Two int64: rows and pairs."""
PAIR_BYTES = 8
"""Two int32: a row of the message, a slot of the receiver."""

SLOT_BYTES = 4
"""One int32: a slot of the receiver."""


class DispatchMode(Enum):
    """Never mixed within one step: the ranks agree on it."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row of `width` channels travels."""

    width: int
    dtype: torch.dtype
    packed: PackedFormat | None

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize if self.packed is None else self.packed.record_bytes(self.width)

    def encode(self, x: Tensor) -> Tensor:
        """x [rows, width] -> [rows, row_bytes] uint8."""
        if self.packed is not None:
            return self.packed.encode(x)
        return x.contiguous().view(torch.uint8).view(len(x), self.row_bytes)

    def decode(self, records: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.decode(records, self.width, self.dtype)
        return _viewed(records, self.dtype).view(len(records), self.width)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """(row, choice) pairs in the order in which they are sent: by receiver, then by row and choice."""

    order: Ints
    """Which pair, of rows · chosen."""
    rows: Ints
    slots: Ints
    bounds: Ints
    """[receivers + 1]"""


class Dispatcher:
    """For the layers of one rank over one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

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
        pairs = _pairs(placement, ids.cpu().numpy(), source=self._transport.rank, receivers=self._transport.size)
        form = RowFormat(x.shape[1], x.dtype, experts.shape.input_format)
        if mode is DispatchMode.NORMAL:
            outputs = self._normal(experts, form, x, pairs)
        else:
            outputs = self._low_latency(experts, form, x, pairs, capacity=rows_max * ids.shape[1])
        by_choice = torch.empty_like(outputs)
        by_choice[torch.from_numpy(pairs.order).to(x.device)] = outputs
        return combine_outputs(by_choice.unflatten(0, ids.shape), weights.to(wide_dtype(x.dtype)))

    def _normal(self, experts: LayerExperts, form: RowFormat, x: Tensor, pairs: _Pairs) -> Tensor:
        size = self._transport.size
        records = form.encode(x)
        messages: list[Tensor] = []
        counts = np.zeros((size, 2), dtype=np.int64)
        for receiver in range(size):
            own = slice(pairs.bounds[receiver], pairs.bounds[receiver + 1])
            rows, places = np.unique(pairs.rows[own], return_inverse=True)
            counts[receiver] = len(rows), len(places)
            heads = np.stack((places, pairs.slots[own]), axis=1).astype(np.int32)
            messages += [records[torch.from_numpy(rows).to(x.device)].flatten(), _bytes(heads, x.device)]
        theirs = self._exchange_counts(counts, x.device)
        per_row = np.array([form.row_bytes, PAIR_BYTES])
        received = self._transport.exchange(
            torch.cat(messages), (counts @ per_row).tolist(), (theirs @ per_row).tolist()
        )
        parts = received.split([int(n) for n in (theirs * per_row).flatten()])
        rows_before = np.cumsum(theirs[:, 0]) - theirs[:, 0]
        heads = [_int32(part).reshape(-1, 2) for part in parts[1::2]]
        rows = form.decode(torch.cat(parts[::2]).view(-1, form.row_bytes))
        outputs = _compute(
            experts,
            rows,
            np.concatenate([head[:, 0] + int(before) for head, before in zip(heads, rows_before, strict=True)]),
            np.concatenate([head[:, 1] for head in heads]),
        )
        return self._send_back(outputs, theirs[:, 1], counts[:, 1])

    def _exchange_counts(self, counts: Ints, device: torch.device) -> Ints:
        each = [COUNT_BYTES] * self._transport.size
        received = self._transport.exchange(_bytes(counts, device), each, each)
        return received.cpu().numpy().view(np.int64).reshape(-1, 2)

    def _low_latency(
        self, experts: LayerExperts, form: RowFormat, x: Tensor, pairs: _Pairs, *, capacity: int
    ) -> Tensor:
        size = self._transport.size
        counts = np.diff(pairs.bounds)
        head_bytes = COUNT_BYTES + capacity * SLOT_BYTES + -(capacity * SLOT_BYTES) % COUNT_BYTES
        heads = np.zeros((size, head_bytes), dtype=np.uint8)
        body = torch.zeros(size, capacity, form.row_bytes, dtype=torch.uint8, device=x.device)
        records = form.encode(x)
        for receiver in range(size):
            own = slice(pairs.bounds[receiver], pairs.bounds[receiver + 1])
            count = int(counts[receiver])
            heads[receiver, :COUNT_BYTES].view(np.int64)[0] = count
            heads[receiver, COUNT_BYTES:].view(np.int32)[:count] = pairs.slots[own]
            body[receiver, :count] = records[torch.from_numpy(pairs.rows[own]).to(x.device)]
        message = torch.cat((_bytes(heads, x.device).view(size, -1), body.flatten(1)), dim=1)
        each = [message.shape[1]] * size
        received = self._transport.exchange(message.flatten(), each, each).view(size, -1)
        their_heads = received[:, :head_bytes].cpu().numpy()
        theirs = np.ascontiguousarray(their_heads[:, :COUNT_BYTES]).view(np.int64)[:, 0]
        slots = np.ascontiguousarray(their_heads[:, COUNT_BYTES:]).view(np.int32).astype(np.int64)
        sent = np.arange(capacity) < theirs[:, None]
        rows = received[:, head_bytes:].reshape(size, capacity, form.row_bytes)[torch.from_numpy(sent).to(x.device)]
        outputs = _compute(experts, form.decode(rows), np.arange(len(rows)), slots[:, :capacity][sent])
        fixed = outputs.new_zeros(size, capacity, outputs.shape[1])
        fixed[torch.from_numpy(sent).to(x.device)] = outputs
        width = outputs.shape[1] * outputs.element_size()
        back = self._transport.exchange(raw_bytes(fixed), [capacity * width] * size, [capacity * width] * size)
        ours = torch.from_numpy(np.arange(capacity) < counts[:, None]).to(x.device)
        return _viewed(back, outputs.dtype).view(size, capacity, -1)[ours]

    def _send_back(self, outputs: Tensor, theirs: Ints, ours: Ints) -> Tensor:
        """outputs [pairs received, D] -> [pairs sent, D]"""
        width = outputs.shape[1] * outputs.element_size()
        received = self._transport.exchange(raw_bytes(outputs), (theirs * width).tolist(), (ours * width).tolist())
        return _viewed(received, outputs.dtype).view(-1, outputs.shape[1])


def _pairs(placement: Placement, ids: Ints, *, source: int, receivers: int) -> _Pairs:
    ranks, slots = placement.choose(ids, source=source)
    order = np.argsort(ranks.reshape(-1), kind="stable")
    bounds = np.searchsorted(ranks.reshape(-1)[order], np.arange(receivers + 1))
    return _Pairs(order, order // max(1, ids.shape[1]), slots.reshape(-1)[order], bounds)


def _compute(experts: LayerExperts, rows: Tensor, pair_rows: Ints, pair_slots: Ints) -> Tensor:
    """[pairs, D] in at least float32."""
    if len(pair_rows) == 0:
        return rows.new_zeros(0, experts.down.shape[1], dtype=wide_dtype(rows.dtype))
    return expert_outputs(
        rows,
        torch.from_numpy(pair_rows).to(rows.device),
        torch.from_numpy(pair_slots).to(rows.device),
        experts.gate_up,
        experts.down,
        limit=experts.shape.limit,
        input_format=experts.shape.input_format,
    )


def _bytes(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).to(device)


def _int32(part: Tensor) -> Ints:
    return np.frombuffer(part.cpu().numpy().tobytes(), dtype=np.int32).astype(np.int64)


def raw_bytes(values: Tensor) -> Tensor:
    """The memory of a tensor, flat, uint8."""
    return values.contiguous().view(torch.uint8).flatten()


def _viewed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, at an aligned address: what follows must not depend on where a message happened to lie."""
    aligned = raw.clone() if raw.data_ptr() % 64 or not raw.is_contiguous() else raw
    return aligned.view(dtype)


def mode_for(rows_max: int, *, prompts: bool, rows_limit: int) -> DispatchMode:
    """What a step of these rows uses: every rank must come to the same answer."""
    return DispatchMode.NORMAL if prompts or rows_max > rows_limit else DispatchMode.LOW_LATENCY


def graph_tier(rows: int, tiers: Sequence[int]) -> int:
    """The least tier that holds so many rows, or the rows themselves above the last one."""
    return next((tier for tier in tiers if tier >= rows), rows)
