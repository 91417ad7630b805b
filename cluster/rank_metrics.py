"""What operators see of one rank. One set a process, on the default registry, beside the store client's.

Gauges are read from the rank when somebody asks for them, so they are never stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from whalepod.engine.interface import (
    FinishedEvent,
    HandoffEvent,
    PromptTokensEvent,
    RankLoad,
    StepEvent,
    StepWork,
    TokensEvent,
)
from whalepod.engine.speculation.statistics import SpeculationCounts, SpeculationWork, add_up
from whalepod.kernels.fallbacks import fallback_counts
from whalepod.model.engram_reads import EngramReads

# A row of a tiny model takes a millisecond on a CPU, a chunk of a large one some seconds.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LENGTHS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

TOKENS = Counter("whalepod_rank_generated_tokens", "Tokens this rank has drawn.")
CACHED_TOKENS = Counter(
    "whalepod_rank_cached_tokens", "Prompt tokens whose state was restored from an earlier request."
)
REPLAYED_TOKENS = Counter("whalepod_rank_replayed_tokens", "Rows computed again to rebuild windows.")
FINISHED = Counter("whalepod_rank_finished", "Requests that ended here, by reason.", ["reason"])
HANDOFFS = Counter(
    "whalepod_rank_handoffs", "Prompts published for a decode rank, by whether the store took them.", ["stored"]
)
STEP_SECONDS = Histogram(
    "whalepod_rank_step_seconds", "Time of one step, by phase (prefill, decode, mixed).", ["phase"], buckets=_SECONDS
)
DRAFT_STEPS = Counter(
    "whalepod_rank_dspark_steps", "Steps with drafts, by how many of them were verified (all, some).", ["verified"]
)
DRAFT_REQUEST_STEPS = Counter("whalepod_rank_dspark_request_steps", "Requests in those steps, added up.")
DRAFTED = Counter("whalepod_rank_dspark_drafted", "Drafts, by their column from 1.", ["column"])
VERIFIED = Counter("whalepod_rank_dspark_verified", "Drafts that were verified, by column.", ["column"])
ACCEPTED = Counter("whalepod_rank_dspark_accepted", "Drafts that stood, by column.", ["column"])
CONFIDENCE = Counter(
    "whalepod_rank_dspark_confidence", "Chances that verified drafts would stand, added up, by column.", ["column"]
)
DRAFT_BUDGET = Gauge(
    "whalepod_rank_dspark_budget",
    "Drafts that the last step with drafts was to verify by plan; without a plan, those it verified.",
)
DRAFT_SECONDS = Histogram("whalepod_rank_dspark_draft_seconds", "Time of one round of drafting.", buckets=_SECONDS)
BATCH_ROWS = Histogram(
    "whalepod_rank_batch_rows", "Rows of one step, by phase (prefill, decode).", ["phase"], buckets=_ROWS
)


class AcceptedLengths(Collector):
    """Tokens that requests got in steps. A step is added at once: a histogram's own `observe` is a call a request."""

    def __init__(self) -> None:
        self._requests = np.zeros(1)
        """[length]: how many requests got so many tokens. Replaced as a whole: another thread reads it."""

    def add(self, counts: SpeculationCounts) -> None:
        at_least = np.concatenate(([counts.request_steps] * 2, counts.accepted, [0]))
        requests = at_least[:-1] - at_least[1:]
        size = max(len(requests), len(self._requests))
        self._requests = np.pad(self._requests, (0, size - len(self._requests))) + np.pad(
            requests, (0, size - len(requests))
        )

    def collect(self) -> Iterator[Metric]:
        requests = self._requests
        yield HistogramMetricFamily(
            "whalepod_rank_dspark_accepted_length",
            "Tokens that a request got in one step with drafts: those that stood, and one.",
            buckets=[
                *((str(float(length)), float(requests[: length + 1].sum())) for length in _LENGTHS),
                ("+Inf", float(requests.sum())),
            ],
            sum_value=float(requests @ np.arange(len(requests))),
        )

    def describe(self) -> list[Metric]:
        """Names without values."""
        return []


ACCEPTED_LENGTHS = AcceptedLengths()
REGISTRY.register(ACCEPTED_LENGTHS)


def count_events(events: Sequence[StepEvent]) -> None:
    """Count what one step produced."""
    tokens = 0
    for event in events:
        match event:
            case PromptTokensEvent():
                pass  # nothing was generated
            case TokensEvent():
                tokens += len(event.tokens)
            case HandoffEvent():
                HANDOFFS.labels(str(event.handoff.stored).lower()).inc()
                tokens += event.handoff.first_token is not None
            case FinishedEvent():
                FINISHED.labels(event.reason.value).inc()
                CACHED_TOKENS.inc(event.cached_tokens)
                REPLAYED_TOKENS.inc(event.replayed_tokens)
    TOKENS.inc(tokens)  # once: this runs on the thread that steps the engine


def count_work(work: StepWork) -> None:
    """Count what one step computed. A step's phase is `mixed` if it holds rows of both kinds."""
    rows = {"decode": work.decode_rows, "prefill": work.prompt_rows}
    phases = [phase for phase, count in rows.items() if count]
    for phase in phases:
        BATCH_ROWS.labels(phase).observe(rows[phase])
    STEP_SECONDS.labels(phases[0] if len(phases) == 1 else "mixed").observe(work.seconds)
    if work.speculation is not None:
        count_speculation(work.speculation)


def count_speculation(work: SpeculationWork) -> None:
    """Count one step's drafts. Emitted tokens are those that stood and one for each request."""
    columns = max((request.drafted for request in work.requests), default=0)
    counts = add_up(columns, [work])
    DRAFT_STEPS.labels("some" if counts.trimmed_steps else "all").inc()
    DRAFT_REQUEST_STEPS.inc(counts.request_steps)
    DRAFT_SECONDS.observe(work.draft_seconds)
    DRAFT_BUDGET.set(counts.verified.sum() if work.budget is None else work.budget)
    ACCEPTED_LENGTHS.add(counts)
    for column in range(columns):
        label = str(column + 1)
        DRAFTED.labels(label).inc(counts.drafted[column])
        VERIFIED.labels(label).inc(counts.verified[column])
        ACCEPTED.labels(label).inc(counts.accepted[column])
        CONFIDENCE.labels(label).inc(counts.confidence[column])


class LoadCollector(Collector):
    """A rank's load as gauges, and what reading n-gram rows costs it."""

    def __init__(
        self,
        load: Callable[[], RankLoad],
        engram: EngramReads,
        *,
        node_cache_blocks: Callable[[], tuple[int, int] | None],
        write_queue_bytes: Callable[[], int],
    ) -> None:
        """`node_cache_blocks`: used and in all; None: there is no node cache."""
        self._load = load
        self._engram = engram
        self._node_cache_blocks = node_cache_blocks
        self._write_queue_bytes = write_queue_bytes

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        used = load.blocks_total - load.blocks_free
        share = used / load.blocks_total if load.blocks_total else 0.0
        queued = load.prefill_tokens_queued
        yield GaugeMetricFamily("whalepod_rank_running", "Requests in the batch.", load.running)
        yield GaugeMetricFamily("whalepod_rank_waiting", "Requests that wait for room.", load.waiting)
        yield GaugeMetricFamily("whalepod_rank_slots", "Requests that fit into the batch.", load.slots_total)
        yield GaugeMetricFamily("whalepod_rank_kv_blocks_free", "Device blocks that hold nothing.", load.blocks_free)
        yield GaugeMetricFamily("whalepod_rank_kv_blocks_used", "Device blocks in use.", used)
        if (cache := self._node_cache_blocks()) is not None:
            yield GaugeMetricFamily("whalepod_kv_node_cache_blocks_used", "Blocks in this machine's cache.", cache[0])
            yield GaugeMetricFamily(
                "whalepod_kv_node_cache_blocks", "Blocks that fit into this machine's cache.", cache[1]
            )
        waiting_bytes = self._write_queue_bytes()
        yield GaugeMetricFamily(
            "whalepod_kv_write_queue_bytes", "Blocks and snapshots of a rank that wait to be stored.", waiting_bytes
        )
        yield GaugeMetricFamily("whalepod_rank_prefill_tokens_queued", "Prompt rows still to be computed.", queued)
        yield CounterMetricFamily("whalepod_rank_engram_rows", "N-gram rows that were read.", self._engram.rows)
        yield CounterMetricFamily(
            "whalepod_rank_engram_cold_pages",
            "Pages of n-gram tables that were not in memory when they were needed.",
            self._engram.cold_pages,
        )
        yield CounterMetricFamily(
            "whalepod_rank_engram_ahead_pages",
            "Pages of n-gram tables that were read from the disk before they were needed.",
            self._engram.ahead_pages,
        )
        fallbacks = CounterMetricFamily(
            "whalepod_rank_kernel_fallbacks",
            "Calls that ran a slower version of an operation than the machine has; the log says why.",
            labels=["operation"],
        )
        calls: dict[str, int] = {}
        for (operation, _), count in fallback_counts().items():
            calls[operation] = calls.get(operation, 0) + count
        for operation, count in calls.items():
            fallbacks.add_metric([operation], count)
        yield fallbacks
        # What autoscalers made for other engines read.
        yield GaugeMetricFamily("vllm:num_requests_running", "As whalepod_rank_running.", load.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for room.", load.waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of device blocks in use, 0 to 1.", share)
        yield GaugeMetricFamily("sglang:num_running_reqs", "As whalepod_rank_running.", load.running)
        yield GaugeMetricFamily("sglang:num_queue_reqs", "Requests that wait for room.", load.waiting)
        yield GaugeMetricFamily("sglang:token_usage", "Share of device blocks in use, 0 to 1.", share)

    def describe(self) -> list[Metric]:
        """Names without values: registering must not ask the rank."""
        return []
