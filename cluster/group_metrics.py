"""A rank's group as metrics: who is in it, how often it has formed, what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whalepod.engine.context_parallel.loop import ContextLoop
from whalepod.engine.expert_parallel.group_loop import GroupLoop


class GroupCollector(Collector):
    """Asks for the metrics at each scrape."""

    def __init__(self, metrics: Callable[[], Iterator[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics()

    def describe(self) -> list[Metric]:
        """Names without values: registering must not ask the rank."""
        return []


def collector_of(loop: GroupLoop | ContextLoop, *, ranks_wanted: int) -> Collector:
    """`ranks_wanted`: as many as the settings say."""
    if isinstance(loop, ContextLoop):
        return GroupCollector(lambda: _context_metrics(loop, ranks_wanted))
    return GroupCollector(lambda: _expert_metrics(loop, ranks_wanted))


def _expert_metrics(loop: GroupLoop, ranks_wanted: int) -> Iterator[Metric]:
    state = loop.state
    yield GaugeMetricFamily(
        "whalepod_expert_group_ranks",
        "Ranks that share experts with this one, itself too; 0: it forms.",
        0 if loop.forming else len(state.members),
    )
    yield GaugeMetricFamily(
        "whalepod_expert_group_ranks_wanted", "Ranks that the group has when it is whole.", ranks_wanted
    )
    yield CounterMetricFamily("whalepod_expert_group_reforms", "Times the group formed anew.", state.reforms)
    yield GaugeMetricFamily(
        "whalepod_eplb_balancedness",
        "Mean over maximum expert load of the ranks, at the last look.",
        state.balancedness,
    )
    yield GaugeMetricFamily("whalepod_expert_group_epoch", "How often the pool's group has formed.", state.epoch)
    yield GaugeMetricFamily(
        "whalepod_expert_padded_share", "Share of a step's rows that unequal batches waste.", state.padded_share
    )
    yield CounterMetricFamily("whalepod_expert_rebalances", "Rebalances that moved experts.", state.rebalances)
    yield CounterMetricFamily("whalepod_expert_dummy_steps", "Steps without rows here.", state.dummy_passes)
    seconds = GaugeMetricFamily(
        "whalepod_expert_step_seconds",
        "What a step takes each rank beside waiting, a moving mean.",
        labels=["rank"],
    )
    for index, value in zip(state.members, state.step_seconds, strict=False):
        seconds.add_metric([str(index)], value)
    yield seconds


def _context_metrics(loop: ContextLoop, ranks_wanted: int) -> Iterator[Metric]:
    state = loop.state
    yield GaugeMetricFamily(
        "whalepod_context_group_ranks",
        "Ranks that compute prompts with this one, itself too; 0: it forms.",
        0 if loop.forming else len(state.members),
    )
    yield GaugeMetricFamily(
        "whalepod_context_group_ranks_wanted", "Ranks that the group has when it is whole.", ranks_wanted
    )
    yield CounterMetricFamily("whalepod_context_group_reforms", "Times the group formed anew.", state.reforms)
    rows = CounterMetricFamily(
        "whalepod_context_rows", "Rows of prompts, by whether the group divided them.", labels=["how"]
    )
    rows.add_metric(["divided"], state.rows_divided)
    rows.add_metric(["alone"], state.rows_alone)
    yield rows
    yield CounterMetricFamily(
        "whalepod_context_copied_bytes", "State that each other rank of the group was sent.", state.copied_bytes
    )
    yield CounterMetricFamily(
        "whalepod_context_blocks_entrusted", "Blocks that other ranks were to store.", state.blocks_entrusted
    )
