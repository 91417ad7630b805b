"""Several streams read as one: nothing lost, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from whalepod.services.router.merging import WAITING_MAX, merge


class Counting:
    """A stream of integers that notes how it ended."""

    def __init__(self, count: int, *, fail_at: int | None = None, hang_at: int | None = None) -> None:
        self.closed = False
        self.produced = 0
        self._count, self._fail_at, self._hang_at = count, fail_at, hang_at

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for value in range(self._count):
                if value == self._fail_at:
                    raise ValueError("as told")
                if value == self._hang_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                self.produced += 1
                yield value
        finally:
            self.closed = True


async def read_all(sources: Sequence[Counting]) -> list[tuple[int, int]]:
    async with aclosing(merge([source.items() for source in sources])) as merged:
        return [item async for item in merged]


@pytest.mark.parametrize("streams", [1, 2, 5])
async def test_every_item_arrives_in_the_order_of_its_stream(streams: int) -> None:
    sources = [Counting(10 * index + 1) for index in range(streams)]
    got: dict[int, list[int]] = {index: [] for index in range(streams)}
    for index, item in await read_all(sources):
        got[index].append(item)
    assert got == {index: list(range(10 * index + 1)) for index in range(streams)}


@pytest.mark.parametrize("streams", [1, 3])
async def test_the_first_error_is_raised_and_ends_all(streams: int) -> None:
    sources = [Counting(5, fail_at=2), *(Counting(9, hang_at=3) for _ in range(streams - 1))]
    with pytest.raises(ValueError, match="as told"):
        await read_all(sources)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_reader_that_leaves_closes_every_stream(streams: int) -> None:
    sources = [Counting(1000) for _ in range(streams)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        await anext(merged)
    assert all(source.closed for source in sources)


async def test_a_slow_reader_is_waited_for() -> None:
    sources = [Counting(10_000), Counting(10_000)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        await anext(merged)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(source.produced for source in sources) <= WAITING_MAX + len(sources) + 1
    assert all(source.closed for source in sources)
