"""How many rows were routed to each expert lately: what EPLB balances. Real rows only: no padding, no dummy steps."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class LoadWindow:
    """Counts of the last `steps` steps of one layer. Steps in which this rank had no row are steps too."""

    def __init__(self, experts: int, *, steps: int) -> None:
        self._steps: deque[Tensor | None] = deque()
        self._length = steps
        self.total = torch.zeros(experts, dtype=torch.int64)
        """[experts] rows over the window, where the experts are chosen."""

    def add(self, experts: Tensor | None) -> None:
        """One step: the experts [rows, chosen] int64 that its real rows were routed to; None: there were none. Waits
        for no device."""
        counts = None if experts is None else self._counts(experts.flatten())
        self._steps.append(counts)
        if counts is not None:
            self.total += counts
        if len(self._steps) > self._length:
            oldest = self._steps.popleft()
            if oldest is not None:
                self.total -= oldest

    def _counts(self, chosen: Tensor) -> Tensor:
        self.total = self.total.to(chosen.device)
        counts = torch.zeros(len(self.total), dtype=torch.int32, device=chosen.device)
        return counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
