"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.1


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended, whatever it ends with.

    Once is not enough: a client library whose own timeout runs out at that very moment reports the cancellation as that
    timeout, and the task goes on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
