"""How many requests run at a time, how many may wait, and how long: first come, first served."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import CapacityError, UnavailableError

from .router_metrics import QUEUE_SECONDS

SMOOTHING = 0.1
"""Weight of the newest request in the average that `Retry-After` is guessed from."""


class QueueFullError(CapacityError):
    """The router's own queue is full, or a request waited in it for too long. The ranks were not asked."""


@dataclass(slots=True, eq=False)
class _Waiter:
    weight: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """A gate for weighted requests. For one event loop."""

    def __init__(
        self,
        *,
        running_max: int,
        queue_max: int,
        queue_timeout_s: float,
        room: Callable[[], int | None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`room`: what the ranks take at a time, when that is less than `running_max`; None: nothing is known. Call
        `room_changed` when it grows."""
        self._running_max = running_max
        self._room = room
        self._queue_max = queue_max
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._running = 0
        self._waiters: deque[_Waiter] = deque()
        self._seconds_average = 1.0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Choices that are being generated."""
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def admitted(self, *, weight: int, deadline: Deadline) -> AsyncGenerator[None]:
        """Hold room for `weight` choices; a request heavier than the whole gate takes all of it.

        Raises QueueFullError (full, or waited too long), UnavailableError (shutting down).
        """
        weight = min(weight, self._running_max)
        arrived_s = self._clock.monotonic_s()
        await self._enter(weight, deadline.earlier(self._queue_timeout_s))
        started_s = self._clock.monotonic_s()
        QUEUE_SECONDS.observe(started_s - arrived_s)
        try:
            yield
        finally:
            seconds = self._clock.monotonic_s() - started_s
            self._seconds_average += SMOOTHING * (seconds - self._seconds_average)
            self._leave(weight)

    def room_changed(self) -> None:
        """Let in who fits now."""
        self._grant()

    def close(self) -> None:
        """Refuse newcomers from now on. Whoever waits was promised a turn and gets it."""
        self._closed = True

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    @property
    def _limit(self) -> int:
        room = self._room()
        return self._running_max if room is None else min(room, self._running_max)

    def _fits(self, weight: int) -> bool:
        limit = self._limit
        return self._running + min(weight, limit) <= limit  # the limit may have shrunk below what waits

    async def _enter(self, weight: int, patience: Deadline) -> None:
        if self._closed:
            raise UnavailableError("this router is shutting down")
        if not self._waiters and self._fits(weight):
            self._take(weight)
            return
        if len(self._waiters) >= self._queue_max:
            raise QueueFullError("too many requests are waiting", retry_after_s=self._retry_after_s())
        waiter = _Waiter(weight)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(patience.remaining_s()):
                await waiter.granted
        except TimeoutError:
            self._give_up(waiter)
            raise QueueFullError("waited too long in the queue", retry_after_s=self._retry_after_s()) from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._grant()  # it may have been too heavy for the room there is; those behind it may not be
            self._note_idle()
        elif waiter.granted.done() and not waiter.granted.cancelled():
            self._leave(waiter.weight)  # granted in the very moment of leaving

    def _take(self, weight: int) -> None:
        self._running += weight
        self._idle.clear()

    def _leave(self, weight: int) -> None:
        self._running -= weight
        self._grant()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._running == 0 and not self._waiters:
            self._idle.set()

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0].weight):
            waiter = self._waiters.popleft()
            if not waiter.granted.done():
                self._take(waiter.weight)
                waiter.granted.set_result(None)

    def _retry_after_s(self) -> float:
        """When a place should be free if requests go on taking as long as they did."""
        return float(math.ceil(max(1.0, self._seconds_average * (len(self._waiters) + 1) / max(1, self._limit))))
