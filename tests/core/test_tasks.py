"""Tasks end when they are told to, even if they do not hear it the first time."""

from __future__ import annotations

import asyncio

from whalepod.core.tasks import cancel_and_wait


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    swallowed: list[int] = []

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if len(swallowed) == 2:
                    raise
                swallowed.append(1)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()
    assert len(swallowed) == 2


async def test_a_task_that_failed_is_left_alone() -> None:
    async def fail() -> None:
        raise ValueError

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    await cancel_and_wait(task)
    assert isinstance(task.exception(), ValueError)
