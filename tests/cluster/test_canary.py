"""The canary counts what differs, says the first difference, and believes its control only if it shows one."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from whalepod.cli.canary import passed
from whalepod.cluster.canary import Answer, CanaryPlan, CanaryReport, Control, compare, judge_control
from whalepod.cluster.canary_cases import CanaryCase, Warmth
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams

CASE = CanaryCase(3, Warmth.COLD, (5, 6, 7), SamplingParams(temperature=0, max_tokens=2, logprobs=0))


def bits(*values: float) -> tuple[bytes, ...]:
    return tuple(struct.pack("<f", value) for value in values)


TRUTH = Answer((8, 9), bits(-1.0, -2.0))
EXACT = CanaryPlan(requests=1, fidelity=Fidelity.EXACT, warm=False)


def report_of(answer: Answer) -> CanaryReport:
    report = CanaryReport(requests=1, control_seen=True)
    compare(CASE, answer, TRUTH, report)
    return report


def test_the_same_bits_are_no_difference() -> None:
    report = report_of(replace(TRUTH, prefill_rank="prefill-0", cached_tokens=64))
    assert (report.different, report.logprob_different, report.handed_off, report.cached) == (0, 0, 1, 1)
    assert report.first_difference is None


def test_one_last_bit_of_one_log_probability_is_seen_and_named() -> None:
    off_by_one_bit = struct.pack("<I", struct.unpack("<I", struct.pack("<f", -2.0))[0] + 1)
    report = report_of(replace(TRUTH, logprob_bits=(TRUTH.logprob_bits[0], off_by_one_bit)))
    assert (report.different, report.logprob_different) == (0, 1)
    assert report.first_difference is not None
    assert "request 3" in report.first_difference
    assert "token 1" in report.first_difference


@pytest.mark.parametrize(
    "answer", [Answer((8, 7), TRUTH.logprob_bits), Answer((8,), bits(-1.0)), Answer((8, 9, 1), bits(-1.0, -2.0, -3.0))]
)
def test_other_fewer_or_more_tokens_are_a_difference(answer: Answer) -> None:
    assert report_of(answer).different == 1


def test_missing_log_probabilities_are_a_difference() -> None:
    assert report_of(Answer((8, 9), ())).logprob_different == 1


@pytest.mark.parametrize(
    ("untouched", "zeroed", "seen"),
    [
        (TRUTH, Answer((8, 1), TRUTH.logprob_bits), True),
        (TRUTH, Answer((8, 9), bits(-1.0, -2.5)), True),
        (TRUTH, TRUTH, False),
        (Answer((1, 1), bits(-1.0, -2.0)), Answer((8, 1), TRUTH.logprob_bits), False),
    ],
)
def test_the_control_is_seen_only_if_the_spoilt_hand_off_alone_differs(
    untouched: Answer, zeroed: Answer, seen: bool
) -> None:
    report = CanaryReport()
    judge_control(Control(CASE, untouched, zeroed), TRUTH, report)
    assert report.control_seen is seen


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"different": 1}, False),
        ({"logprob_different": 1}, False),
        ({"control_seen": False}, False),
        ({"failed": 1}, False),
    ],
)
def test_in_exact_every_difference_failure_or_unseen_control_fails(change: dict[str, int | bool], ok: bool) -> None:
    assert passed(CanaryReport(requests=1, **{"control_seen": True, **change}), EXACT) is ok  # type: ignore[arg-type]


def test_a_warm_run_that_met_no_stored_state_proves_nothing() -> None:
    warm = replace(EXACT, warm=True)
    assert not passed(CanaryReport(requests=1, control_seen=True), warm)
    assert passed(CanaryReport(requests=1, control_seen=True, cached=1), warm)


def test_fast_may_round_and_warm_requests_in_fast_may_differ() -> None:
    fast = replace(EXACT, fidelity=Fidelity.FAST)
    assert passed(CanaryReport(requests=1, control_seen=True, logprob_different=1), fast)
    assert not passed(CanaryReport(requests=1, control_seen=True, different=1), fast)
    assert passed(CanaryReport(requests=1, control_seen=True, different=1, cached=1), replace(fast, warm=True))
