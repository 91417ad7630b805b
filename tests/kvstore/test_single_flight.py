"""One read of a block at a time, and a copy for everybody who asked meanwhile."""

from __future__ import annotations

import threading

from tests.kvstore.values import soon
from whalepod.core.block_keys import BlockHash
from whalepod.kvstore.single_flight import Seat, SingleFlight

BLOCK = BlockHash(b"b" * 32)


def board(flights: SingleFlight, buffer: memoryview) -> Seat | None:
    return flights.board([BLOCK], lambda _: buffer).get(0)


def test_the_second_gets_a_copy_of_what_the_first_reads() -> None:
    flights = SingleFlight()
    first, second = memoryview(bytearray(b"data")), memoryview(bytearray(4))
    assert board(flights, first) is None
    seat = board(flights, second)
    assert seat is not None
    landing = threading.Thread(target=lambda: flights.land([BLOCK], lambda _: (first, False)))
    landing.start()
    assert flights.wait(seat, deadline=soon()) is False
    landing.join()
    assert bytes(second) == b"data"
    assert board(flights, first) is None, "the next reader reads again"


def test_a_failed_read_tells_everybody_at_once() -> None:
    flights = SingleFlight()
    board(flights, memoryview(bytearray(4)))
    seat = board(flights, memoryview(bytearray(4)))
    assert seat is not None
    flights.land([BLOCK], lambda _: None)
    assert flights.wait(seat, deadline=soon()) is None


def test_nothing_is_written_for_somebody_who_has_stopped_waiting() -> None:
    flights = SingleFlight()
    buffer = memoryview(bytearray(4))
    board(flights, memoryview(bytearray(4)))
    seat = board(flights, buffer)
    assert seat is not None
    assert flights.wait(seat, deadline=soon(0.0)) is None
    flights.land([BLOCK], lambda _: (memoryview(b"late"), True))
    assert bytes(buffer) == bytes(4)


def test_of_several_blocks_only_those_that_somebody_reads_have_seats() -> None:
    flights = SingleFlight()
    blocks = [BlockHash(bytes([number]) * 32) for number in range(4)]
    places = [memoryview(bytearray(1)) for _ in blocks]
    assert flights.board(blocks[1:3], lambda place: places[place]) == {}
    mine = [memoryview(bytearray(1)) for _ in blocks]
    seats = flights.board(blocks, mine.__getitem__)
    assert sorted(seats) == [1, 2]
    flights.land(blocks[1:3], lambda place: (memoryview(b"xy"[place : place + 1]), True) if place else None)
    assert [flights.wait(seats[place], deadline=soon()) for place in (1, 2)] == [None, True]
    assert b"".join(mine) == b"\0\0y\0"
    flights.land([blocks[0], blocks[3]], lambda _: None)
    assert flights.board(blocks, mine.__getitem__) == {}, "all have landed"
