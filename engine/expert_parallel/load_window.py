"""How many rows were routed to each expert lately: what EPLB balances. Real rows only: no padding, no dummy steps."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class LoadWindow:
    """Counts of the last `steps` steps of one layer. Steps in which this rank had no row are steps too."""

    def __init__(self, experts: int, *, steps: int) -> None:
        self._steps: deque[Counts | None] = deque()
        self._length = steps
        self.total: Counts = np.zeros(experts, dtype=np.int64)
        """[experts] rows over the window."""

    def add(self, experts: Counts | None) -> None:
        """One step: the experts [rows, chosen] that its real rows were routed to; None: there were none."""
        counts = None if experts is None else np.bincount(experts.reshape(-1), minlength=len(self.total))
        self._steps.append(counts)
        if counts is not None:
            self.total += counts
        if len(self._steps) > self._length:
            oldest = self._steps.popleft()
            if oldest is not None:
                self.total -= oldest
