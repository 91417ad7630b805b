"""When to look for requests that ran out of time: not at every step, not each of them."""

from __future__ import annotations

from collections.abc import Iterable

from whalepod.core.clock import Deadline


class Expiry:
    """Knows a deadline that none of the live requests' comes before."""

    def __init__(self) -> None:
        self._first: Deadline | None = None

    def note(self, deadline: Deadline) -> None:
        """One more request."""
        if self._first is None or deadline.at_s < self._first.at_s:
            self._first = deadline

    @property
    def due(self) -> bool:
        """A request may have run out of time: end those that have, then say what is `left`."""
        return self._first is not None and self._first.expired

    def left(self, deadlines: Iterable[Deadline]) -> None:
        self._first = min(deadlines, key=lambda deadline: deadline.at_s, default=None)

    def remaining_s(self) -> float | None:
        """Seconds until it may be due; None: no request was noted."""
        return None if self._first is None else self._first.remaining_s()
