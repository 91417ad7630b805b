"""How many requests run at a time, how many may wait, for how long, and who is next.

Lower priorities come first, then the tenant that has the least running, then who came first. A request that would not
start in time is refused when it comes, not when its time is up: it would only keep others from being served well.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import CapacityError, DrainingError

from .admission_bound import Bound, OwnBound
from .router_metrics import QUEUE_SECONDS, SHED
from .tenant_limits import Limits, TenantLimits

SMOOTHING = 0.1
"""Weight of the newest request in the average that waiting times are guessed from."""

LOOK_AGAIN_S = 0.25
LOOK_AT_OTHERS_S = 0.01
"""The same where other processes run requests under the same bound: they do not say when one has ended."""

SAMPLES_MIN = 16
"""Requests that must have ended before a guess is a reason to refuse."""


class QueueFullError(CapacityError):
    """The router's own queue is full, or a request waited in it for too long. The ranks were not asked."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request. `weight`: choices that it asks for. `deadline`: when it must have ended."""

    weight: int
    deadline: Deadline
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    visit: Visit
    weight: int
    arrival: int
    arrived_s: float
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
        limits: TenantLimits | None = None,
        bound: Bound | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`room`: what the ranks take at a time, when that is less than `running_max`; None: nothing is known. Call
        `room_changed` when it grows. `bound`: counts against `running_max` and `queue_max`, for other processes too."""
        self._running_max = running_max
        self._room = room
        self._bound = bound or OwnBound(running_max=running_max, queue_max=queue_max)
        self._look_s = LOOK_AGAIN_S if bound is None else LOOK_AT_OTHERS_S
        self._queue_timeout_s = queue_timeout_s
        self._limits = limits or TenantLimits(Limits(), clock=clock)
        self._clock = clock
        self._running = 0
        self._running_of: Counter[str] = Counter()
        self._waiters: list[_Waiter] = []
        self._arrivals = 0
        self._shows = False
        """Whether the bound has been shown somebody who waits."""
        self._seconds_average = 1.0
        self._samples = 0
        self._look: asyncio.TimerHandle | None = None
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
    async def admitted(self, visit: Visit) -> AsyncGenerator[None]:
        """Hold room for a request. Raises what `enter` does."""
        started_s = await self.enter(visit)
        try:
            yield
        finally:
            self.leave(visit, started_s)

    async def enter(self, visit: Visit) -> float:
        """Take room for a request; one heavier than the whole gate takes all of it. Call `leave` with what it returns.

        Raises TenantLimitError, QueueFullError (full, would wait or has waited too long), DrainingError.
        """
        if self._closed:
            raise DrainingError("this router is shutting down")
        self._limits.enter(visit.tenant, requests=visit.weight)
        arrived_s = self._clock.monotonic_s()
        try:
            await self._enter(visit, min(visit.weight, self._running_max))
        except BaseException:
            self._limits.leave(visit.tenant, requests=visit.weight)
            raise
        started_s = self._clock.monotonic_s()
        QUEUE_SECONDS.observe(started_s - arrived_s)
        return started_s

    def leave(self, visit: Visit, started_s: float) -> None:
        seconds = self._clock.monotonic_s() - started_s
        self._seconds_average += (SMOOTHING if self._samples else 1.0) * (seconds - self._seconds_average)
        self._samples += 1
        self._leave(visit.tenant, min(visit.weight, self._running_max))
        self._limits.leave(visit.tenant, requests=visit.weight)

    def charge_tokens(self, tenant: str, tokens: int) -> None:
        """Count a tenant's tokens against its limit."""
        self._limits.charge_tokens(tenant, tokens)

    def room_changed(self) -> None:
        """Let in who fits now."""
        self._grant()

    def close(self) -> None:
        """Refuse newcomers from now on. Whoever waits was promised a turn and gets it."""
        self._closed = True

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def _ranks_take(self, weight: int) -> bool:
        room = self._room()
        return room is None or self._running + min(weight, room) <= room  # it may have shrunk below what waits

    async def _enter(self, visit: Visit, weight: int) -> None:
        now_s = self._clock.monotonic_s()
        turn = (visit.priority, self._running_of[visit.tenant], now_s)
        if not self._waiters and self._ranks_take(weight) and self._bound.try_take(weight, turn):
            self._count(visit.tenant, weight)
            return
        patience = visit.deadline.earlier(self._queue_timeout_s)
        self._wait_or_refuse(visit, weight, patience)
        self._arrivals += 1
        waiter = _Waiter(visit, weight, self._arrivals, now_s)
        self._waiters.append(waiter)
        if self._look is None:
            self._look_again()
        try:
            async with asyncio.timeout(patience.remaining_s()):
                await waiter.granted
        except TimeoutError:
            self._give_up(waiter)
            SHED.labels("waited_too_long").inc()
            raise QueueFullError("waited too long in the queue", retry_after_s=self._retry_after_s()) from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _wait_or_refuse(self, visit: Visit, weight: int, patience: Deadline) -> None:
        """Raises QueueFullError if the queue is full, or too long for this request to start in time."""
        if not self._bound.try_wait(weight):
            SHED.labels("queue_full").inc()
            raise QueueFullError("too many requests are waiting", retry_after_s=self._retry_after_s())
        try:
            self._refuse_if_hopeless(visit, patience)
        except QueueFullError:
            self._bound.waits_no_more(weight)
            raise

    def _refuse_if_hopeless(self, visit: Visit, patience: Deadline) -> None:
        if self._samples < SAMPLES_MIN:
            return
        before = sum(waiter.weight for waiter in self._waiters if waiter.visit.priority <= visit.priority)
        wait_s = self._wait_s(before + self._bound.waiting_weight_elsewhere(visit.priority))
        if wait_s > patience.remaining_s():
            SHED.labels("hopeless").inc()
            raise QueueFullError(
                f"would start in about {wait_s:.0f} s, later than it may wait",
                retry_after_s=float(math.ceil(max(1.0, wait_s - patience.remaining_s()))),
            )

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._remove(waiter)
            self._grant()  # it may have been too heavy for the room there is; those behind it may not be
            self._note_idle()
        elif waiter.granted.done() and not waiter.granted.cancelled():
            self._leave(waiter.visit.tenant, waiter.weight)  # granted in the very moment of leaving

    def _remove(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._bound.waits_no_more(waiter.weight)

    def _count(self, tenant: str, weight: int) -> None:
        self._running += weight
        self._running_of[tenant] += weight
        self._idle.clear()

    def _leave(self, tenant: str, weight: int) -> None:
        self._bound.give_back(weight)
        self._running -= weight
        self._running_of[tenant] -= weight
        if not self._running_of[tenant]:
            del self._running_of[tenant]
        self._grant()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._running == 0 and not self._waiters:
            self._idle.set()

    def _grant(self) -> None:
        while self._waiters:
            waiter = min(self._waiters, key=self._turn)
            turn = (waiter.visit.priority, self._running_of[waiter.visit.tenant], waiter.arrived_s)
            ranks_take = self._ranks_take(waiter.weight)
            if not ranks_take or not self._bound.try_take(waiter.weight, turn):
                self._bound.show(turn, waits_for_bound=ranks_take)
                self._shows = True
                return
            self._remove(waiter)
            if waiter.granted.done():
                self._bound.give_back(waiter.weight)
            else:
                self._count(waiter.visit.tenant, waiter.weight)
                waiter.granted.set_result(None)
        if self._shows:
            self._bound.show(None, waits_for_bound=False)
            self._shows = False

    def _look_again(self) -> None:
        """Room also grows without a word: ranks say what other routers left free when they say anything."""
        self._grant()
        waits = bool(self._waiters)
        self._look = asyncio.get_running_loop().call_later(self._look_s, self._look_again) if waits else None

    def _turn(self, waiter: _Waiter) -> tuple[int, int, int]:
        return waiter.visit.priority, self._running_of[waiter.visit.tenant], waiter.arrival

    def _wait_s(self, weight_before: int) -> float:
        """When a newcomer should start, with so much before it, if requests go on taking as long as they did."""
        room, elsewhere = self._room(), self._bound.running_elsewhere
        limit = self._running_max if room is None else min(room + elsewhere, self._running_max)
        return self._seconds_average * (weight_before + 1) / max(1, limit)

    def _retry_after_s(self) -> float:
        """When a place should be free."""
        here = sum(waiter.weight for waiter in self._waiters)
        last = max((waiter.visit.priority for waiter in self._waiters), default=0)
        return float(math.ceil(max(1.0, self._wait_s(here + self._bound.waiting_weight_elsewhere(last)))))
