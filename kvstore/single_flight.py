"""One read of a block at a time in this process: whoever asks for it meanwhile gets a copy of what arrives.

board(block, buffer) ──▶ None: you read it, then `land` ──▶ copies into every seat that still waits
                     └─▶ Seat: somebody reads it, `wait`
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Deadline


@dataclass(slots=True, eq=False)
class _Flight:
    landed: threading.Event | None = None
    """Made for the first who waits: most reads have none."""
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
        self._flights: dict[BlockHash, _Flight] = {}

    def board(self, block: BlockHash, buffer: memoryview) -> Seat | None:
        """None: the caller reads the block, and calls `land` whatever comes of it."""
        with self._lock:
            flight = self._flights.get(block)
            if flight is None:
                self._flights[block] = _Flight()
                return None
            if flight.landed is None:
                flight.landed = threading.Event()
            seat = Seat(buffer, flight)
            flight.seats.append(seat)
            return seat

    def land(self, block: BlockHash, buffer: memoryview, *, exact: bool | None) -> None:
        """The block is in `buffer`, verified; `exact` None: it could not be read."""
        with self._lock:
            flight = self._flights.pop(block)
            if exact is not None:
                for seat in flight.seats:
                    seat.buffer[:] = buffer
                    seat.exact = exact
        if flight.landed is not None:
            flight.landed.set()

    def wait(self, seat: Seat, *, deadline: Deadline) -> bool | None:
        """Whether the block that has arrived in the seat's buffer is exact; None: it has not, and never will."""
        assert seat.flight.landed is not None
        seat.flight.landed.wait(deadline.remaining_s())
        with self._lock:
            if seat in seat.flight.seats:
                seat.flight.seats.remove(seat)
            return seat.exact
