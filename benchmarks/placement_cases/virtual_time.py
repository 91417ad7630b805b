"""An event loop whose time passes only when everybody waits: hours of a trace in seconds, and the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer instead of sleeping. Nothing in it may wait for the outside."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will happen")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualClock:
    """The loop's time, for code that asks a clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def unix_ms(self) -> int:
        return int(1000 * self._loop.now_s)


def run_virtually(loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, and close the loop."""
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()
