"""The failure table against the store that misbehaves by a seed, and whether the check would notice."""

from __future__ import annotations

import logging

import pytest

from whalepod.kvstore import value_sinks
from whalepod.kvstore.fault_check import check_faults, check_schedule, schedules
from whalepod.kvstore.faulty_transport import Fault, FaultSchedule

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="whalepod.kvstore")


def test_f2_f3_f5_f12_f15_f17_f24_no_fault_gives_a_wrong_byte_or_a_late_answer() -> None:
    report = check_faults(seeds=5)
    assert (report.cases, report.wrong, report.late) == (50, 0, 0)
    assert report.blocks_hit > 500
    assert report.faults > 20


@pytest.mark.slow
def test_f2_f3_f5_f12_f15_f17_f24_no_fault_gives_a_wrong_byte_in_a_hundred_thousand_rounds() -> None:
    report = check_faults(seeds=420, first_seed=1000)
    assert report.calls > 100_000
    assert (report.wrong, report.late) == (0, 0)


def test_without_faults_everything_is_hit() -> None:
    report = check_schedule(FaultSchedule(seed=1, rates={}), rounds=200)
    assert (report.wrong, report.late, report.faults) == (0, 0, 0)
    assert report.blocks_hit > 500


def test_the_same_seed_is_the_same_run() -> None:
    schedule = next(schedules(seeds=1, first_seed=9))
    assert check_schedule(schedule) == check_schedule(schedule)


def test_a_client_that_does_not_check_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: value_sinks.BlockSink) -> None:
        self._blocks.take(self._number, exact=self._exact)

    monkeypatch.setattr(value_sinks.BlockSink, "finish", trusting)
    assert check_schedule(FaultSchedule(seed=2, rates={Fault.CORRUPT: 0.2}), rounds=100).wrong > 0
