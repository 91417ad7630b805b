"""Gathers the rows of a divided prompt through a group's transport."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from whalepod.engine.expert_parallel.transport import Transport


class TransportRows:
    """A RowExchange."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Raises GroupBrokenError."""
        width = math.prod(rows.shape[1:]) * rows.element_size()
        own = rows.contiguous().view(torch.uint8).flatten() if rows.numel() else rows.new_zeros(0, dtype=torch.uint8)
        received = self._transport.exchange(
            own.repeat(self.size), [own.numel()] * self.size, [count * width for count in counts]
        )
        return received.clone().view(rows.dtype).view(sum(counts), *rows.shape[1:])
