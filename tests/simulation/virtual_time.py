"""An event loop whose clock stands still while anything is left to do, and then jumps to the next timer.

    ready calls ─▶ run ─▶ none left: at rest ─▶ `on_rest` hooks (a thread that would be woken) ─▶ clock jumps ─▶ timers

There are no threads and no sockets: what is given to an executor runs at once, in place.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH_MS = 1_750_000_000_000
"""What the calendar says when a run begins."""


class StuckError(AssertionError):
    """Nothing will ever happen again, and somebody still waits."""


@dataclass(slots=True)
class SimulatedClock:
    """The time of a run. Only its event loop moves it."""

    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return EPOCH_MS + int(self.now_s * 1000)


class _NoSelector(selectors.SelectSelector):
    """Waiting is what moves the clock."""

    def __init__(self, clock: SimulatedClock, at_rest: Callable[[], bool]) -> None:
        super().__init__()
        self._clock = clock
        self._at_rest = at_rest

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return []
        if not self._at_rest():
            if timeout is None:
                raise StuckError("nothing is left to do, and somebody waits")
            self._clock.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`on_rest` hooks are called when nothing is left to do at this moment; one that finds work schedules it and says
    True."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._virtual = clock
        self.on_rest: list[Callable[[], bool]] = []
        super().__init__(_NoSelector(clock, self._at_rest))

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """In place: a thread that is infinitely fast."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  whoever waits for the future is told
            done.set_exception(error)
        return done

    def timers_left(self) -> list[str]:
        """Timers that have neither rung nor been cancelled."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # only the base class knows
        return [repr(handle) for handle in scheduled if not handle.cancelled()]

    def _at_rest(self) -> bool:
        """Whether some hook has found something to do. All are asked, always in the same order."""
        found = [hook() for hook in self.on_rest]
        return any(found)


def run_virtually(clock: SimulatedClock, main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` to its end on virtual time."""
    loop = VirtualLoop(clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
