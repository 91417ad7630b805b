"""The bound that an operator has set on requests that run and that wait, and what counts against it."""

from __future__ import annotations

from typing import Protocol

Turn = tuple[int, int, float]
"""Who is next: the least priority, the least that its tenant has running, the earliest arrival (monotonic seconds)."""


class Bound(Protocol):
    """Counts weights of requests: the choices that they ask for."""

    @property
    def running_elsewhere(self) -> int:
        """What runs in other processes of this router."""
        ...

    def waiting_weight_elsewhere(self, priority: int) -> int:
        """What waits there and would go before a request of this priority."""
        ...

    def try_take(self, weight: int, turn: Turn) -> bool:
        """Let a request run, unless the bound is reached or somebody elsewhere is before it."""
        ...

    def give_back(self, weight: int) -> None:
        """It runs no more."""
        ...

    def try_wait(self, weight: int) -> bool:
        """Let a request wait, unless too many do."""
        ...

    def waits_no_more(self, weight: int) -> None: ...

    def show(self, first: Turn | None, *, waits_for_bound: bool) -> None:
        """Who is the first in turn here now, and whether it waits for nothing but this bound. Called again and again
        while anybody waits."""
        ...


class OwnBound:
    """Of a router that is one process."""

    running_elsewhere = 0

    def __init__(self, *, running_max: int, queue_max: int) -> None:
        self._running_max = running_max
        self._queue_max = queue_max
        self._running = 0
        self._waiting = 0

    def waiting_weight_elsewhere(self, priority: int) -> int:
        del priority
        return 0

    def try_take(self, weight: int, turn: Turn) -> bool:
        del turn
        if self._running + weight > self._running_max:
            return False
        self._running += weight
        return True

    def give_back(self, weight: int) -> None:
        self._running -= weight

    def try_wait(self, weight: int) -> bool:
        del weight
        if self._waiting >= self._queue_max:
            return False
        self._waiting += 1
        return True

    def waits_no_more(self, weight: int) -> None:
        del weight
        self._waiting -= 1

    def show(self, first: Turn | None, *, waits_for_bound: bool) -> None:
        """There is nobody to see it."""
