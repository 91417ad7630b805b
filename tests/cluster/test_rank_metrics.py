"""What a rank counts of its steps, and its gauges: under our names and under those that autoscalers read."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from whalepod.cluster.rank_metrics import LoadCollector, count_work
from whalepod.engine.interface import RankLoad, StepWork
from whalepod.engine.speculation.statistics import SpeculationWork, VerifiedRequest
from whalepod.kernels.fallbacks import note_fallback
from whalepod.model.engram_reads import EngramReads

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
    lengths = {at_most: counted("accepted_length_bucket", le=at_most) for at_most in ("1.0", "2.0", "+Inf")}
    tokens = counted("accepted_length_sum")
    count_work(StepWork(6, 0, 0.01, SpeculationWork(requests, budget=4, draft_seconds=0.002)))

    def more(name: str) -> list[float]:
        return [counted(name, column=column) - before[name, column] for column in "123"]

    assert more("drafted_total") == [2, 2, 1]
    assert more("verified_total") == [2, 1, 1]
    assert more("accepted_total") == [2, 0, 0]
    assert more("confidence_total") == pytest.approx([1.5, 0.5, 0.25])
    assert counted("request_steps_total") - request_steps == 2
    assert counted("steps_total", verified="some") - steps["some"] == 1
    assert counted("steps_total", verified="all") == steps["all"]
    grown = [counted("accepted_length_bucket", le=at_most) - before for at_most, before in lengths.items()]
    assert grown == [0, 2, 2]
    assert counted("accepted_length_sum") - tokens == 4


def test_tokens_of_a_step_are_told_by_request_however_many_columns_the_step_had() -> None:
    before = {at_most: counted("accepted_length_bucket", le=at_most) for at_most in ("1.0", "2.0", "4.0", "+Inf")}
    for accepted in ((0, 3), (1,), (0,)):
        requests = tuple(VerifiedRequest(stood, stood, stood, None, None) for stood in accepted)
        count_work(StepWork(9, 0, 0.01, SpeculationWork(requests, budget=None, draft_seconds=0.002)))
    grown = [counted("accepted_length_bucket", le=at_most) - count for at_most, count in before.items()]
    assert grown == [2, 3, 4, 4]


@pytest.mark.parametrize(("planned", "told"), [(4, 4), (0, 0), (None, 5)])
def test_the_budget_is_what_was_planned_and_without_a_plan_what_was_verified(planned: int | None, told: int) -> None:
    requests = (VerifiedRequest(3, 3, 1, None, None), VerifiedRequest(2, 2, 0, None, None))
    count_work(StepWork(7, 0, 0.01, SpeculationWork(requests, budget=planned, draft_seconds=0.002)))
    assert counted("budget") == told


def test_a_step_without_drafts_counts_none() -> None:
    before = counted("request_steps_total")
    count_work(StepWork(6, 0, 0.01))
    assert counted("request_steps_total") == before


def collector(load: RankLoad, *, node_cache: tuple[int, int] | None) -> LoadCollector:
    return LoadCollector(
        lambda: load, EngramReads(), node_cache_blocks=lambda: node_cache, write_queue_bytes=lambda: 4096
    )


def gauges(load: RankLoad) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector(load, node_cache=(3, 8)))
    lines = generate_latest(registry).decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def test_operations_that_fall_back_are_counted_by_name() -> None:
    load = RankLoad(slots_total=8, blocks_free=16, blocks_total=64)
    for reason in ("one reason", "another", "another"):
        note_fallback("planted_operation", reason)
    assert gauges(load)['whalepod_rank_kernel_fallbacks_total{operation="planted_operation"}'] == 3


def test_a_machines_cache_tells_its_blocks_and_a_rank_without_one_nothing() -> None:
    load = RankLoad(slots_total=8, blocks_free=16, blocks_total=64)
    told = gauges(load)
    assert (told["whalepod_kv_node_cache_blocks_used"], told["whalepod_kv_node_cache_blocks"]) == (3, 8)
    assert told["whalepod_kv_write_queue_bytes"] == 4096
    registry = CollectorRegistry()
    registry.register(collector(load, node_cache=None))
    assert "node_cache" not in generate_latest(registry).decode()


def test_queues_and_kv_use_have_the_names_of_other_engines_too() -> None:
    told = gauges(RankLoad(running=3, waiting=2, slots_total=8, blocks_free=16, blocks_total=64))
    assert (told["whalepod_rank_kv_blocks_free"], told["whalepod_rank_kv_blocks_used"]) == (16, 48)
    for ours, theirs in (
        ("whalepod_rank_running", ("vllm:num_requests_running", "sglang:num_running_reqs")),
        ("whalepod_rank_waiting", ("vllm:num_requests_waiting", "sglang:num_queue_reqs")),
    ):
        assert {told[name] for name in theirs} == {told[ours]}
    assert told["vllm:kv_cache_usage_perc"] == told["sglang:token_usage"] == 0.75
    assert gauges(RankLoad())["vllm:kv_cache_usage_perc"] == 0
