"""The life of a rank's process, whatever it does.

start ─▶ ready ─▶ serve ─▶ stop asked ─▶ drain ─▶ close          stop asked, or a failure, during any of them ─▶ close
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from whalepod.core.tasks import cancel_and_wait

from .registration import RankInfo


class LivingRank(Protocol):
    """The parts of one rank, and the order in which they start and stop."""

    async def start(self) -> None:
        """Returns when the rank is in placement."""
        ...

    def describe(self) -> RankInfo:
        """The registration as of now."""
        ...

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Raises InternalError if the rank breaks first."""
        ...

    async def drain(self, seconds: float) -> None:
        """Leave placement, then let what is here finish, at most so long."""
        ...

    async def close(self) -> None:
        """Stop whatever has started, also in the middle of a start."""
        ...


async def live(
    rank: LivingRank, *, stop: asyncio.Event, drain_s: float, on_ready: Callable[[RankInfo], None] | None
) -> None:
    """From its start until nothing of the rank is left. A `stop` that comes before it is ready ends the start, as soon
    as what cannot be interrupted (reading weights) is over. Raises what `start` and `serve_until` do."""
    try:
        if not await _ends_before(stop, rank.start()):
            return
        # What is loaded by now stays. Walking through it takes a full collection 0.1 s, in the middle of a stream.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(rank.describe())
        await rank.serve_until(stop)
        await rank.drain(drain_s)
    finally:
        await rank.close()


async def _ends_before(stop: asyncio.Event, starting: Coroutine[Any, Any, None]) -> bool:
    """False: it has been cancelled, because `stop` came first. Raises what it raises."""
    start, stopping = asyncio.create_task(starting), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((start, stopping), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            await start
        return start.done()
    finally:
        stopping.cancel()
        await cancel_and_wait(start)
