"""Recording and alert rules, from the metrics that exist. `make docs` writes them to `files/rules.yaml` of the chart.

Every alert has a section of its own name in docs/runbook.md. Sums are per namespace, which is empty outside Kubernetes.
"""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.values_schema import CHART

RULES_FILE = CHART / "files/rules.yaml"
FAILED = "internal|worker_lost|unavailable|capacity|deadline|queue_full"
"""Outcomes of requests that are the cluster's fault, or its load's."""


def _ratio(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _rate(metric: str, *, by: str = "namespace", over: str = "5m") -> str:
    return f"sum by ({by}) (rate({metric}[{over}]))"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (namespace, le) (rate({metric}_bucket[5m])))"


RECORDED = {
    "whalepod:requests:rate5m": _rate("whalepod_requests_total"),
    "whalepod:requests_failed:ratio5m": _ratio(
        _rate(f'whalepod_requests_total{{outcome=~"{FAILED}"}}'), _rate("whalepod_requests_total")
    ),
    "whalepod:completion_tokens:rate5m": _rate("whalepod_completion_tokens_total"),
    "whalepod:prompt_tokens:rate5m": _rate("whalepod_prompt_tokens_total"),
    "whalepod:cached_tokens:ratio5m": _ratio(
        _rate("whalepod_cached_tokens_total"), _rate("whalepod_prompt_tokens_total")
    ),
    "whalepod:time_to_first_token_seconds:p50": _quantile(0.5, "whalepod_time_to_first_token_seconds"),
    "whalepod:time_to_first_token_seconds:p99": _quantile(0.99, "whalepod_time_to_first_token_seconds"),
    "whalepod:inter_token_latency_seconds:p50": _quantile(0.5, "whalepod_inter_token_latency_seconds"),
    "whalepod:inter_token_latency_seconds:p99": _quantile(0.99, "whalepod_inter_token_latency_seconds"),
    "whalepod:rank_kv_blocks:used_ratio": _ratio(
        "sum by (namespace, job, instance) (whalepod_rank_kv_blocks_used)",
        "sum by (namespace, job, instance) (whalepod_rank_kv_blocks_used + whalepod_rank_kv_blocks_free)",
    ),
    "whalepod:dspark_accepted:ratio5m": _ratio(
        _rate("whalepod_rank_dspark_accepted_total"), _rate("whalepod_rank_dspark_verified_total")
    ),
}


def _alert(name: str, expr: str, *, lasting: str, severity: str, summary: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook": f"docs/runbook.md#{name.lower()}"},
    }


ALERTS: tuple[dict[str, Any], ...] = (
    _alert(
        "WhalepodNoDecodeRank",
        "count by (namespace) (whalepod_router_store_up) "
        'unless count by (namespace) (whalepod_router_ranks{role="decode"} > 0)',
        lasting="1m",
        severity="critical",
        summary="No router sees a decode rank: nothing is answered.",
    ),
    _alert(
        "WhalepodPrefillPoolLost",
        'max by (namespace) (max_over_time(whalepod_router_ranks{role=~"prefill_.*"}[6h])) '
        'unless max by (namespace) (whalepod_router_ranks{role=~"prefill_.*"})',
        lasting="2m",
        severity="critical",
        summary="The prefill pool that was there has no rank left: routers are not ready.",
    ),
    _alert(
        "WhalepodRanksLost",
        "sum by (namespace, role) (whalepod_router_ranks) "
        "< 0.9 * max_over_time(sum by (namespace, role) (whalepod_router_ranks)[1h:1m])",
        lasting="10m",
        severity="warning",
        summary="More than a tenth of the {{ $labels.role }} ranks of the last hour is gone.",
    ),
    _alert(
        "WhalepodRequestsFail",
        "whalepod:requests_failed:ratio5m > 0.01",
        lasting="5m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the requests fail by our fault.",
    ),
    _alert(
        "WhalepodOverload",
        "sum by (namespace) (rate(whalepod_router_shed_total[5m])) > 0",
        lasting="5m",
        severity="warning",
        summary="Requests are refused for load, {{ $value | humanize }} a second.",
    ),
    _alert(
        "WhalepodQueueLong",
        "sum by (namespace) (whalepod_router_requests_waiting) > sum by (namespace) (whalepod_router_requests_running)",
        lasting="5m",
        severity="warning",
        summary="More requests wait than run.",
    ),
    _alert(
        "WhalepodSlowFirstToken",
        "whalepod:time_to_first_token_seconds:p99 > 10",
        lasting="10m",
        severity="warning",
        summary="One request in a hundred waits {{ $value | humanizeDuration }} for its first token.",
    ),
    _alert(
        "WhalepodStreamsBroken",
        "sum by (namespace) (increase(whalepod_router_client_streams_broken_total[10m])) > 0",
        lasting="0m",
        severity="warning",
        summary="{{ $value | humanize }} client streams ended with an error in ten minutes.",
    ),
    _alert(
        "WhalepodFailovers",
        "sum by (namespace) (increase(whalepod_router_decode_streams_lost_total[15m])) > 3",
        lasting="0m",
        severity="warning",
        summary="Decode ranks are lost again and again.",
    ),
    _alert(
        "WhalepodBlocksFull",
        "whalepod:rank_kv_blocks:used_ratio > 0.97",
        lasting="15m",
        severity="warning",
        summary="{{ $labels.instance }} has used its device blocks up: requests wait and are preempted.",
    ),
    _alert(
        "WhalepodStoreDown",
        "max by (namespace) (whalepod_router_store_up) == 0",
        lasting="2m",
        severity="warning",
        summary="No router reaches the store: every prompt is computed.",
    ),
    _alert(
        "WhalepodStoreShardBypassed",
        "sum by (namespace, shard) (rate(whalepod_kv_breaker_open_seconds_total[5m])) > 0.5",
        lasting="5m",
        severity="warning",
        summary="{{ $labels.shard }} is not used most of the time.",
    ),
    _alert(
        "WhalepodStoreDropsWrites",
        "sum by (namespace, reason) (rate(whalepod_kv_write_dropped_total[5m])) > 1",
        lasting="10m",
        severity="warning",
        summary="Values are not stored: {{ $labels.reason }}.",
    ),
    _alert(
        "WhalepodWrongValues",
        "sum by (namespace) (increase(whalepod_kv_checksum_error_total[10m])) > 0 "
        "or sum by (namespace) (increase(whalepod_kv_identity_mismatch_total[10m])) > 0",
        lasting="0m",
        severity="critical",
        summary="The store gave back wrong bytes. They were not used; find out whose they are.",
    ),
    _alert(
        "WhalepodStoreFragmented",
        "max by (namespace) (whalepod_kv_fragmentation_ratio) > 1.5 "
        "and max by (namespace) (whalepod_kv_memory_bytes) > 1e9",
        lasting="15m",
        severity="warning",
        summary="A server of the store takes {{ $value | humanize }} times the memory that its values need.",
    ),
    _alert(
        "WhalepodExpertGroupIncomplete",
        "min by (namespace, job, pool) (whalepod_expert_group_ranks) "
        "< max by (namespace, job, pool) (whalepod_expert_group_ranks_wanted)",
        lasting="5m",
        severity="warning",
        summary="A pool that shares its experts goes on without some of its ranks.",
    ),
    _alert(
        "WhalepodContextGroupIncomplete",
        "min by (namespace, job, instance) (whalepod_context_group_ranks < whalepod_context_group_ranks_wanted)",
        lasting="5m",
        severity="warning",
        summary="{{ $labels.instance }} divides long prompts with fewer ranks than it should.",
    ),
    _alert(
        "WhalepodExpertsUnbalanced",
        "min by (namespace, job, pool) (whalepod_eplb_balancedness > 0) < 0.5",
        lasting="30m",
        severity="warning",
        summary="The busiest rank computes twice the mean of its pool's experts.",
    ),
    _alert(
        "WhalepodStraggler",
        "max by (namespace, job, pool, rank) (whalepod_expert_step_seconds) "
        "> on (namespace, job, pool) group_left "
        "2 * quantile by (namespace, job, pool) (0.5, whalepod_expert_step_seconds)",
        lasting="5m",
        severity="warning",
        summary="Rank {{ $labels.rank }} takes twice as long as the others, and all wait for it.",
    ),
    _alert(
        "WhalepodCanaryFailed",
        "whalepod_canary_passed == 0",
        lasting="0m",
        severity="critical",
        summary="The cluster says something else than one process would.",
    ),
    _alert(
        "WhalepodUsageLost",
        "sum by (namespace) (increase(whalepod_router_usage_records_dropped_total[1h])) > 0",
        lasting="0m",
        severity="warning",
        summary="{{ $value | humanize }} usage records could not be written.",
    ),
)


def rule_groups() -> dict[str, Any]:
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    return {
        "groups": [
            {"name": "whalepod.recorded", "interval": "30s", "rules": recorded},
            {"name": "whalepod.alerts", "rules": list(ALERTS)},
        ]
    }


def rules_text() -> str:
    head = "# Made by `make docs` from tests/deploy/prometheus_rules.py. What to do about an alert: docs/runbook.md.\n"
    return head + yaml.safe_dump(rule_groups(), sort_keys=False, width=120)
