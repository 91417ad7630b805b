"""A canary that goes on counts every round, asks other things each time, and outlives a cluster that is away."""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY

from whalepod.cluster.canary import CanaryPlan, CanaryReport
from whalepod.cluster.canary_watch import watch
from whalepod.core.errors import UnavailableError
from whalepod.engine.interface import Fidelity


def rounds(outcome: str) -> float:
    return REGISTRY.get_sample_value("whalepod_canary_rounds_total", {"outcome": outcome}) or 0.0


async def test_rounds_are_counted_by_what_came_of_them() -> None:
    before = {outcome: rounds(outcome) for outcome in ("passed", "failed", "unreachable")}
    stop = asyncio.Event()
    seeds: list[int] = []
    reports = [
        CanaryReport(requests=4, control_seen=True),
        None,
        CanaryReport(requests=4, control_seen=True, different=1),
    ]

    async def run(plan: CanaryPlan) -> CanaryReport:
        seeds.append(plan.seed)
        report = reports[len(seeds) - 1]
        if len(seeds) == len(reports):
            stop.set()
        if report is None:
            raise UnavailableError("nobody is there")
        return report

    def passes(report: CanaryReport, _: CanaryPlan) -> bool:
        return not report.different

    plan = CanaryPlan(requests=4, fidelity=Fidelity.EXACT, warm=False, seed=7)
    await watch(plan, run, passes, every_s=0.001, stop=stop)
    assert seeds == [7, 8, 9]
    assert {outcome: rounds(outcome) - count for outcome, count in before.items()} == dict.fromkeys(before, 1.0)
    assert REGISTRY.get_sample_value("whalepod_canary_passed") == 0
