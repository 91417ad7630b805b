"""What a rank counts of its steps."""

from __future__ import annotations

import numpy as np
from prometheus_client import REGISTRY

from whalepod.cluster.rank_metrics import count_work
from whalepod.engine.interface import StepWork
from whalepod.engine.speculation.statistics import SpeculationWork, VerifiedRequest

DRAFTS = "whalepod_rank_dspark"


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{DRAFTS}_{name}", labels) or 0.0


def test_drafts_are_counted_by_column_and_reconcile_with_what_was_said() -> None:
    survival = np.array([0.75, 0.5, 0.25])
    requests = (
        VerifiedRequest(3, 3, 1, np.zeros(3), survival),
        VerifiedRequest(2, 1, 1, np.zeros(3), survival),
    )
    names = ("drafted_total", "verified_total", "accepted_total", "confidence_total")
    before = {(name, column): counted(name, column=column) for name in names for column in "123"}
    steps = {verified: counted("steps_total", verified=verified) for verified in ("all", "some")}
    request_steps = counted("request_steps_total")
    count_work(StepWork(6, 0, 0.01, SpeculationWork(requests, budget=4, draft_seconds=0.002)))

    def more(name: str) -> list[float]:
        return [counted(name, column=column) - before[name, column] for column in "123"]

    assert more("drafted_total") == [2, 2, 1]
    assert more("verified_total") == [2, 1, 1]
    assert more("accepted_total") == [2, 0, 0]
    assert more("confidence_total") == [1.5, 0.5, 0.25]
    assert counted("request_steps_total") - request_steps == 2
    assert counted("steps_total", verified="some") - steps["some"] == 1
    assert counted("steps_total", verified="all") == steps["all"]


def test_a_step_without_drafts_counts_none() -> None:
    before = counted("request_steps_total")
    count_work(StepWork(6, 0, 0.01))
    assert counted("request_steps_total") == before
