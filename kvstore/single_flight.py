"""One read of a block at a time in this process: whoever asks for it meanwhile gets a copy of what arrives.

board(blocks) ──▶ None: you read it, then `land` ──▶ copies into every seat that still waits
              └─▶ Seat: somebody reads it, `wait`
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Deadline


@dataclass(slots=True, eq=False)
class _Flight:
    """Somebody waits for what another reads."""

    landed: threading.Event = field(default_factory=threading.Event)
    seats: list[Seat] = field(default_factory=list["Seat"])


@dataclass(slots=True, eq=False)
class Seat:
    """Waits for a block that another thread reads. `exact` is set if it has arrived."""

    buffer: memoryview
    flight: _Flight
    exact: bool | None = None


class SingleFlight:
    """Thread-safe. A reader lands what it reads before it waits for others, so nobody waits in a circle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[BlockHash, _Flight | None] = {}
        """None: nobody waits, as for most."""

    def board(self, blocks: Iterable[tuple[BlockHash, memoryview]]) -> list[Seat | None]:
        """For each block, None: the caller reads it, and calls `land` whatever comes of it."""
        with self._lock:
            return [self._board(block, buffer) for block, buffer in blocks]

    def land(self, blocks: Iterable[tuple[BlockHash, memoryview, bool | None]]) -> None:
        """Each is in its buffer, verified, and exact or not; None: it could not be read."""
        with self._lock:
            flights = [self._land(*block) for block in blocks]
        for flight in flights:
            if flight is not None:
                flight.landed.set()

    def _board(self, block: BlockHash, buffer: memoryview) -> Seat | None:
        if block not in self._flights:
            self._flights[block] = None
            return None
        flight = self._flights[block]
        if flight is None:
            flight = self._flights[block] = _Flight()
        seat = Seat(buffer, flight)
        flight.seats.append(seat)
        return seat

    def _land(self, block: BlockHash, buffer: memoryview, exact: bool | None) -> _Flight | None:
        flight = self._flights.pop(block)
        if flight is not None and exact is not None:
            for seat in flight.seats:
                seat.buffer[:] = buffer
                seat.exact = exact
        return flight

    def wait(self, seat: Seat, *, deadline: Deadline) -> bool | None:
        """Whether the block that has arrived in the seat's buffer is exact; None: it has not, and never will."""
        seat.flight.landed.wait(deadline.remaining_s())
        with self._lock:
            if seat in seat.flight.seats:
                seat.flight.seats.remove(seat)
            return seat.exact
