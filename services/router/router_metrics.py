"""What operators see of one router. One set a process, on the default registry, beside the store client's.

No label comes from a client: endpoints, outcomes and reasons are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whalepod.cluster.registration import RankInfo

from .loop_metrics import LoopCounter, LoopHistogram

_FAST: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_REQUEST: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

REQUESTS = Counter("whalepod_requests", "Requests that ended, by endpoint and outcome.", ["endpoint", "outcome"])
FIRST_TOKEN_SECONDS = LoopHistogram(
    "whalepod_time_to_first_token_seconds", "From arrival to the first token.", bounds=_REQUEST
)
INTER_TOKEN_SECONDS = LoopHistogram("whalepod_inter_token_latency_seconds", "Between two tokens.", bounds=_TOKEN)
REQUEST_SECONDS = Histogram("whalepod_request_seconds", "From arrival to the end.", ["endpoint"], buckets=_REQUEST)
QUEUE_SECONDS = LoopHistogram("whalepod_queue_seconds", "Spent waiting for admission.", bounds=_REQUEST)
SHED = Counter(
    "whalepod_router_shed",
    "Requests refused for load: queue_full, hopeless (would not start in time), waited_too_long.",
    ["reason"],
)
PROMPT_TOKENS = LoopCounter("whalepod_prompt_tokens", "Prompt tokens of requests that got a token.")
CACHED_TOKENS = LoopCounter("whalepod_cached_tokens", "Of those, tokens that came from stored prefix.")
COMPLETION_TOKENS = LoopCounter("whalepod_completion_tokens", "Tokens generated for clients.")

TOKENIZE_SECONDS = LoopHistogram(
    "whalepod_router_tokenize_seconds", "Rendering and tokenizing a prompt.", bounds=_REQUEST
)
IMAGES = Counter("whalepod_router_images", "Images that requests brought, counted each time.")
IMAGE_PREPARE_SECONDS = Histogram(
    "whalepod_router_image_prepare_seconds",
    "Fetching a request's images and making them ready for the model.",
    buckets=_REQUEST,
)
VISION_AHEAD = Counter(
    "whalepod_router_images_ahead",
    "Images that vision ranks were asked to encode before a rank needs them: encoded, known, failed.",
    ["outcome"],
)
LOOKUP_SECONDS = LoopHistogram(
    "whalepod_router_lookup_seconds", "Asking the store for the longest prefix.", bounds=_FAST
)
PLACEMENT_SECONDS = LoopHistogram("whalepod_router_placement_seconds", "Choosing ranks.", bounds=_FAST)
PREDICTED_HIT_TOKENS = LoopCounter("whalepod_router_predicted_hit_tokens", "Stored tokens the lookup saw.")
ACTUAL_HIT_TOKENS = LoopCounter("whalepod_router_actual_hit_tokens", "Stored tokens the ranks used (R).")
PREFIX_WAITS = Counter(
    "whalepod_router_prefix_waits",
    "Requests that waited for a prefix another one computed: shared, given_up.",
    ["outcome"],
)
PREFIX_WAIT_SECONDS = Histogram(
    "whalepod_router_prefix_wait_seconds", "Spent waiting for a prefix that another request computed.", buckets=_REQUEST
)
RETRIES = Counter("whalepod_router_retries", "Further attempts, by what the last one ended with.", ["reason"])
HANDOFFS = Counter(
    "whalepod_router_handoffs",
    "Remote prefills by outcome: handed_off, finished_at_prefill, not_stored, prefill_failed.",
    ["outcome"],
)
HANDOFF_EXPOSED_SECONDS = Histogram(
    "whalepod_router_handoff_exposed_seconds", "From the prefill rank's READY to the first token.", buckets=_REQUEST
)
STREAMS_LOST = Counter("whalepod_router_decode_streams_lost", "Streams to decode ranks that broke.")
FAILOVERS = Counter("whalepod_router_failovers", "Streams that lost their decode rank after a token was sent.")
FAILOVER_SECONDS = Histogram(
    "whalepod_router_failover_seconds", "From the loss of a decode rank to the next token.", buckets=_REQUEST
)
STREAMS_BROKEN = Counter("whalepod_router_client_streams_broken", "Client streams that ended with an error event.")


@dataclass(frozen=True, slots=True)
class RouterGauges(Collector):
    """State of one router, read when somebody asks."""

    running: Callable[[], int]
    waiting: Callable[[], int]
    ranks: Callable[[], list[RankInfo]]
    store_ok: Callable[[], bool]

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("whalepod_router_requests_running", "Requests admitted.", self.running())
        yield GaugeMetricFamily("whalepod_router_requests_waiting", "Requests in the queue.", self.waiting())
        # What autoscalers made for other engines add to the ranks' own.
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for room.", self.waiting())
        yield GaugeMetricFamily("sglang:num_queue_reqs", "Requests that wait for room.", self.waiting())
        yield GaugeMetricFamily(
            "whalepod_router_store_up",
            "The store answers lookups; 0: ranks are chosen by load alone.",
            self.store_ok(),
        )
        family = GaugeMetricFamily("whalepod_router_ranks", "Usable ranks by role.", labels=["role"])
        roles = [info.role.value for info in self.ranks()]
        for role in sorted(set(roles)):
            family.add_metric([role], roles.count(role))
        yield family


def exposition(gauges: RouterGauges) -> bytes:
    """The body of GET /metrics."""
    own = CollectorRegistry()
    own.register(gauges)
    return generate_latest(REGISTRY) + generate_latest(own)
