"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

WAITING_MAX = 64
"""Items that may wait for a slow reader, over all streams."""


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(index of the stream, item). The first error of any stream is raised, and ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(WAITING_MAX)
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        open_count = len(tasks)
        while open_count:
            item = await queue.get()
            if item is None:
                open_count -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001  carried to the reader, who raises it
        await queue.put(error)
    else:
        await queue.put(None)
