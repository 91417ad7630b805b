"""So many run, so many wait, in order; everyone else is told when to come back."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.router.router_under_test import until
from whalepod.core.clock import Deadline
from whalepod.core.errors import UnavailableError
from whalepod.services.router.admission import SAMPLES_MIN, Admission, QueueFullError, Visit


def gate(*, running_max: int = 1, queue_max: int = 2, queue_timeout_s: float = 5.0) -> Admission:
    return Admission(running_max=running_max, queue_max=queue_max, queue_timeout_s=queue_timeout_s)


class StoppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(1000 * self.now_s)


class Visitor:
    """Enters, and stays until told to go."""

    def __init__(self, admission: Admission, *, weight: int = 1, tenant: str = "", priority: int = 0) -> None:
        self.inside = False
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(admission, weight, tenant, priority))

    async def _visit(self, admission: Admission, weight: int, tenant: str, priority: int) -> None:
        async with admission.admitted(Visit(weight, Deadline.after(10.0), tenant, priority)):
            self.inside = True
            await self._go.wait()
        self.inside = False

    async def leave(self) -> None:
        self._go.set()
        await self.task


async def test_waiters_enter_in_the_order_in_which_they_came() -> None:
    admission = gate()
    first = Visitor(admission)
    await until(lambda: first.inside)
    second, third = Visitor(admission), Visitor(admission)
    await until(lambda: admission.waiting == 2)
    await first.leave()
    await until(lambda: second.inside)
    assert not third.inside
    await second.leave()
    await until(lambda: third.inside)
    await third.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_one_more_than_may_wait_is_refused_at_once_and_told_when_to_return() -> None:
    admission = gate(queue_max=1)
    inside, waiting = Visitor(admission), Visitor(admission)
    await until(lambda: admission.waiting == 1)
    with pytest.raises(QueueFullError) as caught:
        async with admission.admitted(Visit(1, Deadline.after(5.0))):
            pass
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    await inside.leave()
    await waiting.leave()


async def test_waiting_too_long_ends_with_a_refusal_and_leaves_no_trace() -> None:
    admission = gate(queue_timeout_s=0.05)
    inside = Visitor(admission)
    await until(lambda: inside.inside)
    with pytest.raises(QueueFullError):
        async with admission.admitted(Visit(1, Deadline.after(5.0))):
            pass
    assert admission.waiting == 0
    await inside.leave()
    assert admission.running == 0


async def test_a_waiter_that_goes_away_frees_its_place_for_those_behind_it() -> None:
    admission = gate(running_max=2)
    one = Visitor(admission)
    await until(lambda: one.inside)
    heavy, light = Visitor(admission, weight=2), Visitor(admission)
    await until(lambda: admission.waiting == 2)
    assert not light.inside, "nobody overtakes"
    heavy.task.cancel()
    await until(lambda: light.inside)
    await one.leave()
    await light.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_waiter_cancelled_in_the_moment_it_is_let_in_gives_the_place_back() -> None:
    admission = gate()
    first = Visitor(admission)
    await until(lambda: first.inside)
    second = Visitor(admission)
    await until(lambda: admission.waiting == 1)
    first._go.set()
    await first.task  # the place has been granted to the second, which has not run yet
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)
    third = Visitor(admission)
    await until(lambda: third.inside)
    await third.leave()


async def test_a_request_heavier_than_the_gate_takes_all_of_it() -> None:
    admission = gate(running_max=3)
    heavy = Visitor(admission, weight=50)
    await until(lambda: heavy.inside)
    assert admission.running == 3
    await heavy.leave()


async def test_closing_refuses_newcomers_and_keeps_its_word_to_those_who_wait() -> None:
    admission = gate()
    inside, waiting = Visitor(admission), Visitor(admission)
    await until(lambda: admission.waiting == 1)
    admission.close()
    with pytest.raises(UnavailableError):
        async with admission.admitted(Visit(1, Deadline.after(5.0))):
            pass
    await inside.leave()
    await until(lambda: waiting.inside)
    idle = asyncio.create_task(admission.wait_until_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    await waiting.leave()
    await idle


async def test_what_the_ranks_take_may_be_less_and_may_grow_and_shrink() -> None:
    room: list[int | None] = [1]
    admission = Admission(running_max=5, queue_max=8, queue_timeout_s=5.0, room=lambda: room[0])
    first, heavy, last = Visitor(admission), Visitor(admission, weight=3), Visitor(admission)
    await until(lambda: admission.waiting == 2)
    room[0] = None  # nothing is known: the gate's own number stands
    admission.room_changed()
    await until(lambda: first.inside and heavy.inside and last.inside)
    room[0] = 2
    waiting = Visitor(admission)
    await until(lambda: admission.waiting == 1)
    await first.leave()
    await last.leave()
    await asyncio.sleep(0)
    assert not waiting.inside
    await heavy.leave()
    await until(lambda: waiting.inside)
    await waiting.leave()
    assert admission.running == 0


async def test_lower_priorities_come_first() -> None:
    admission = gate(queue_max=5)
    first = Visitor(admission)
    await until(lambda: first.inside)
    later, sooner, soonest = (Visitor(admission, priority=priority) for priority in (5, 0, -3))
    await until(lambda: admission.waiting == 3)
    for leaving, entering in ((first, soonest), (soonest, sooner), (sooner, later)):
        await leaving.leave()
        await until(lambda visitor=entering: visitor.inside)
    await later.leave()


async def test_a_tenant_that_floods_the_queue_does_not_keep_another_out() -> None:
    admission = gate(running_max=2, queue_max=9)
    flood = [Visitor(admission, tenant="flood") for _ in range(6)]
    await until(lambda: admission.waiting == 4)
    other = Visitor(admission, tenant="other")
    await until(lambda: admission.waiting == 5)
    await flood[0].leave()
    await until(lambda: other.inside)
    await other.leave()
    for visitor in flood[1:]:
        await visitor.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_request_that_would_not_start_in_time_is_refused_when_it_comes() -> None:
    clock = StoppedClock()
    admission = Admission(running_max=1, queue_max=9, queue_timeout_s=8.0, clock=clock)
    for _ in range(SAMPLES_MIN):
        async with admission.admitted(Visit(1, Deadline.after(100.0, clock))):
            clock.now_s += 3.0
    inside = Visitor(admission)
    await until(lambda: inside.inside)
    waiting = [Visitor(admission), Visitor(admission)]
    await until(lambda: admission.waiting == 2)
    with pytest.raises(QueueFullError, match="would start in about 9 s") as caught:
        async with admission.admitted(Visit(1, Deadline.after(100.0, clock))):
            pass
    assert caught.value.retry_after_s == 1.0
    urgent = Visitor(admission, priority=-1)
    await until(lambda: admission.waiting == 3)
    for visitor in (inside, urgent, *waiting):
        await visitor.leave()


async def test_room_that_others_leave_is_seen_without_being_told() -> None:
    room = 1
    admission = Admission(running_max=9, queue_max=9, queue_timeout_s=5.0, room=lambda: room)
    first, second = Visitor(admission), Visitor(admission)
    await until(lambda: admission.waiting == 1)
    room = 2
    await until(lambda: second.inside, timeout_s=2.0)
    await first.leave()
    await second.leave()
