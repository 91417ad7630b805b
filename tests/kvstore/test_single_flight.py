"""One read of a block at a time, and a copy for everybody who asked meanwhile."""

from __future__ import annotations

import threading

from tests.kvstore.values import soon
from whalepod.core.block_keys import BlockHash
from whalepod.kvstore.single_flight import SingleFlight

BLOCK = BlockHash(b"b" * 32)


def test_the_second_gets_a_copy_of_what_the_first_reads() -> None:
    flights = SingleFlight()
    first, second = memoryview(bytearray(b"data")), memoryview(bytearray(4))
    assert flights.board(BLOCK, first) is None
    seat = flights.board(BLOCK, second)
    assert seat is not None
    landing = threading.Thread(target=lambda: flights.land(BLOCK, first, exact=False))
    landing.start()
    assert flights.wait(seat, deadline=soon()) is False
    landing.join()
    assert bytes(second) == b"data"
    assert flights.board(BLOCK, first) is None, "the next reader reads again"


def test_a_failed_read_tells_everybody_at_once() -> None:
    flights = SingleFlight()
    flights.board(BLOCK, memoryview(bytearray(4)))
    seat = flights.board(BLOCK, memoryview(bytearray(4)))
    assert seat is not None
    flights.land(BLOCK, memoryview(bytearray(4)), exact=None)
    assert flights.wait(seat, deadline=soon()) is None


def test_nothing_is_written_for_somebody_who_has_stopped_waiting() -> None:
    flights = SingleFlight()
    buffer = memoryview(bytearray(4))
    flights.board(BLOCK, memoryview(bytearray(4)))
    seat = flights.board(BLOCK, buffer)
    assert seat is not None
    assert flights.wait(seat, deadline=soon(0.0)) is None
    flights.land(BLOCK, memoryview(b"late"), exact=True)
    assert bytes(buffer) == bytes(4)
