from __future__ import annotations

import pytest

from whalepod.engine.fetch_worth import SOFT_DEADLINE_S_MIN, WORTH_FACTOR, FetchWorth
from whalepod.engine.interface import StepWork


def measured(row_s: float) -> FetchWorth:
    worth = FetchWorth()
    worth.note_step(StepWork(prompt_rows=1000, seconds=1000 * row_s))
    return worth


def test_nothing_measured_leaves_every_read_worth_it() -> None:
    assert FetchWorth().block_s(256) is None
    assert FetchWorth().soft_deadline_s(10_000, at_most_s=2.0) == 2.0


def test_a_block_may_take_a_share_of_what_computing_it_takes() -> None:
    assert measured(1e-4).block_s(256) == pytest.approx(WORTH_FACTOR * 256 * 1e-4)


@pytest.mark.parametrize(
    "work",
    [
        StepWork(prompt_rows=10, seconds=9.0),
        StepWork(prompt_rows=1000, decode_rows=1, seconds=9.0),
        StepWork(decode_rows=3, seconds=9.0),
        StepWork(prompt_rows=1000),
    ],
)
def test_steps_that_say_little_about_a_row_are_left_out(work: StepWork) -> None:
    worth = measured(1e-4)
    worth.note_step(work)
    assert worth.block_s(1) == pytest.approx(WORTH_FACTOR * 1e-4)


def test_the_estimate_follows_the_steps() -> None:
    worth = measured(1e-4)
    for _ in range(100):
        worth.note_step(StepWork(prompt_rows=100, seconds=0.1))
    assert worth.block_s(1) == pytest.approx(WORTH_FACTOR * 1e-3, rel=0.01)


def test_a_read_ends_when_its_prefix_could_have_been_computed_within_bounds() -> None:
    worth = measured(1e-4)
    assert worth.soft_deadline_s(8000, at_most_s=2.0) == pytest.approx(0.8)
    assert worth.soft_deadline_s(10, at_most_s=2.0) == SOFT_DEADLINE_S_MIN
    assert worth.soft_deadline_s(100_000, at_most_s=2.0) == 2.0
    assert worth.soft_deadline_s(10, at_most_s=0.1) == 0.1


def test_what_is_forgotten_decides_nothing() -> None:
    worth = measured(1e-4)
    worth.forget()
    assert worth.block_s(256) is None
