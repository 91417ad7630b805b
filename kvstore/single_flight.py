"""One read of a block at a time in this process: whoever asks for it meanwhile gets a copy of what arrives.

board(blocks) ──▶ no seat: you read it, then `land` ──▶ copies into every seat that still waits
              └─▶ Seat: somebody reads it, `wait`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
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

    def board(self, blocks: Sequence[BlockHash], buffer: Callable[[int], memoryview]) -> dict[int, Seat]:
        """Seats for those that somebody reads already, by their place in `blocks`; `buffer` says where such a one goes.
        The caller reads the others, and calls `land` whatever comes of it."""
        with self._lock:
            if self._flights.keys().isdisjoint(blocks):
                self._flights.update(dict.fromkeys(blocks))
                return {}
            seats: dict[int, Seat] = {}
            for place, block in enumerate(blocks):
                if block not in self._flights:
                    self._flights[block] = None
                else:
                    seats[place] = self._seat(block, buffer(place))
            return seats

    def flies(self, blocks: Iterable[BlockHash]) -> bool:
        """Somebody reads one of them."""
        with self._lock:
            return not self._flights.keys().isdisjoint(blocks)

    def land(self, blocks: Sequence[BlockHash], read: Callable[[int], tuple[memoryview, bool] | None]) -> None:
        """`read` says of a place in `blocks` where that one is, verified, and whether it is exact; None: it could not
        be read."""
        with self._lock:
            flights = [self._flights.pop(block, None) for block in blocks]
            landed = [(place, flight) for place, flight in enumerate(flights) if flight is not None]
            for place, flight in landed:
                arrived = read(place)
                if arrived is not None:
                    for seat in flight.seats:
                        seat.buffer[:] = arrived[0]
                        seat.exact = arrived[1]
        for _, flight in landed:
            flight.landed.set()

    def _seat(self, block: BlockHash, buffer: memoryview) -> Seat:
        flight = self._flights[block]
        if flight is None:
            flight = self._flights[block] = _Flight()
        seat = Seat(buffer, flight)
        flight.seats.append(seat)
        return seat

    def wait(self, seat: Seat, *, deadline: Deadline) -> bool | None:
        """Whether the block that has arrived in the seat's buffer is exact; None: it has not, and never will."""
        seat.flight.landed.wait(deadline.remaining_s())
        with self._lock:
            if seat in seat.flight.seats:
                seat.flight.seats.remove(seat)
            return seat.exact
