from __future__ import annotations

from whalepod.core.clock import Deadline
from whalepod.engine import left_snapshots
from whalepod.engine.left_snapshots import LeftSnapshots
from whalepod.kvstore.faulty_transport import VirtualClock


def test_what_nobody_can_want_any_more_is_due_once() -> None:
    clock = VirtualClock()
    left = LeftSnapshots(clock)
    assert left.remaining_s() is None
    left.note(b"late", Deadline.after(20, clock))
    left.note(b"soon", Deadline.after(5, clock))
    assert (left.due, left.remaining_s()) == (False, 5)
    clock.now_s += 5
    assert left.due
    assert left.take_due() == [b"soon"]
    assert (left.take_due(), left.remaining_s()) == ([], 15)
    clock.now_s += 100
    assert left.remaining_s() == 0
    assert left.take_due() == [b"late"]


def test_its_memory_is_bounded() -> None:
    clock = VirtualClock()
    left = LeftSnapshots(clock)
    for number in range(left_snapshots.REMEMBERED_MAX + 5):
        left.note(b"%d" % number, Deadline.after(1, clock))
    clock.now_s += 2
    assert len(left.take_due()) == left_snapshots.REMEMBERED_MAX
