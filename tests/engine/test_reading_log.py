from __future__ import annotations

from whalepod.engine.reading_log import SAY_EVERY_S, ReadingLog


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def test_a_long_reading_says_now_and_then_how_far_it_is_and_a_short_one_only_that_it_is_done() -> None:
    clock = HandClock()
    reading = ReadingLog(what="role full", clock=clock)
    for read in range(1, 31):
        clock.now_s += SAY_EVERY_S / 5
        reading.note(read, 30)
    assert reading.lines == 6
    reading.finish()
    assert (reading.lines, reading.read_bytes) == (7, 30)
