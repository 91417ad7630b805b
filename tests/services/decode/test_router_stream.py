"""What waits for one router is bounded, and a stream ends for one reason only."""

from __future__ import annotations

import asyncio

from whalepod.core.errors import AuthenticationError, CapacityError
from whalepod.core.ids import RequestId
from whalepod.services.decode.servicer import MESSAGES_WAITING_MAX, RouterStream

KEY = (RequestId(b"sixteen bytes id"), 1)


async def drained(stream: RouterStream) -> list[object]:
    """Everything up to the end of the stream."""
    messages: list[object] = []
    async with asyncio.timeout(5):
        while isinstance(message := await stream.next_message(), bytes):
            messages.append(message)
    return [*messages, message]


async def test_messages_arrive_in_order_and_the_end_comes_when_nothing_is_left_to_say() -> None:
    stream = RouterStream()
    stream.live[KEY] = None
    stream.send(b"1")
    stream.reading = False
    stream.end_if_idle()
    stream.send(b"2")
    del stream.live[KEY]
    stream.end_if_idle()
    assert await drained(stream) == [b"1", b"2", None]


async def test_a_router_that_does_not_read_is_broken_off_and_nothing_more_is_kept_for_it() -> None:
    stream = RouterStream()
    for _ in range(MESSAGES_WAITING_MAX + 100):
        stream.send(b"step")
    assert stream.broken
    messages = await drained(stream)
    assert len(messages) == MESSAGES_WAITING_MAX + 1
    assert isinstance(messages[-1], CapacityError)


async def test_the_first_reason_to_break_off_is_the_one_that_is_told() -> None:
    stream = RouterStream()
    stream.break_off(AuthenticationError("first"))
    stream.break_off(CapacityError("second"))
    stream.send(b"late")
    assert str((await drained(stream))[-1]) == "first"
