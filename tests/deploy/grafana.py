"""Three Grafana dashboards as data, from one list of panels. Part of `make docs`, which writes `files/dashboards/`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.deploy.values_schema import CHART

DASHBOARDS_DIR = CHART / "files/dashboards"
SCHEMA_VERSION = 39
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
"""Of a panel, in Grafana's grid of 24 columns."""

Unit = Literal["s", "short", "percentunit", "reqps", "ops", "Bps", "bytes"]


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: expression → legend. In an expression `$here` stands for the matchers of what is looked at."""

    title: str
    unit: Unit
    queries: Mapping[str, str]
    kind: Literal["timeseries", "stat"] = "timeseries"
    note: str = ""


Rows = Mapping[str, Sequence[Panel]]

HERE = 'namespace=~"$namespace",job=~"$job"'


def _rate(metric: str, by: str, where: str = "") -> str:
    matchers = f"{where},$here" if where else "$here"
    return f"sum by ({by}) (rate({metric}{{{matchers}}}[$__rate_interval]))"


def _total(metric: str, by: str = "") -> str:
    return f"sum by ({by}) ({metric}{{$here}})" if by else f"sum({metric}{{$here}})"


def _seconds(metric: str, by: str = "", shares: Sequence[float] = (0.5, 0.99)) -> dict[str, str]:
    labels = f"{by}, le" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    rates = _rate(f"{metric}_bucket", labels)
    return {f"histogram_quantile({share}, {rates})": f"{legend}p{share * 100:g}" for share in shares}


def _named(name: str, queries: Mapping[str, str]) -> dict[str, str]:
    return {query: f"{name} {legend}" for query, legend in queries.items()}


def _share(part: str, whole: str, by: str = "") -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}" if by else f"{_rate(part, 'job')} / {_rate(whole, 'job')}"


CLUSTER: Rows = {
    "Now": (
        Panel("Usable ranks", "short", {_total("whalepod_router_ranks", "role"): "{{role}}"}, kind="stat"),
        Panel("Requests running", "short", {_total("whalepod_router_requests_running"): "running"}, kind="stat"),
        Panel("Requests waiting", "short", {_total("whalepod_router_requests_waiting"): "waiting"}, kind="stat"),
    ),
    "What clients see": (
        Panel("Requests by outcome", "reqps", {_rate("whalepod_requests_total", "outcome"): "{{outcome}}"}),
        Panel("Time to first token", "s", _seconds("whalepod_time_to_first_token_seconds")),
        Panel("Between two tokens", "s", _seconds("whalepod_inter_token_latency_seconds")),
        Panel("Whole requests", "s", _seconds("whalepod_request_seconds", "endpoint", (0.5,))),
        Panel(
            "Tokens a second",
            "ops",
            {
                _rate("whalepod_prompt_tokens_total", "job"): "prompt",
                _rate("whalepod_cached_tokens_total", "job"): "of those from stored prefixes",
                _rate("whalepod_completion_tokens_total", "job"): "generated",
            },
        ),
        Panel("Waiting for admission", "s", _seconds("whalepod_queue_seconds")),
    ),
    "Routers": (
        Panel("Refused for load", "reqps", {_rate("whalepod_router_shed_total", "reason"): "{{reason}}"}),
        Panel("Tokenizing", "s", _seconds("whalepod_router_tokenize_seconds")),
        Panel(
            "Lookup and placement",
            "s",
            {
                **_named("lookup", _seconds("whalepod_router_lookup_seconds")),
                **_named("placement", _seconds("whalepod_router_placement_seconds")),
            },
        ),
        Panel("Waits for prefixes that others compute", "reqps", {
            _rate("whalepod_router_prefix_waits_total", "outcome"): "{{outcome}}",
        }),
        Panel("Hand-offs", "reqps", {_rate("whalepod_router_handoffs_total", "outcome"): "{{outcome}}"}),
        Panel("Hand-off seen by the client", "s", _seconds("whalepod_router_handoff_exposed_seconds")),
    ),
    "Faults": (
        Panel("Further attempts", "reqps", {_rate("whalepod_router_retries_total", "reason"): "{{reason}}"}),
        Panel(
            "Lost streams",
            "ops",
            {
                _rate("whalepod_router_decode_streams_lost_total", "job"): "to decode ranks",
                _rate("whalepod_router_failovers_total", "job"): "gone on elsewhere",
                _rate("whalepod_router_client_streams_broken_total", "job"): "broken for clients",
            },
        ),
        Panel("Pause of a failover", "s", _seconds("whalepod_router_failover_seconds")),
    ),
    "Ranks": (
        Panel(
            "Requests of a rank",
            "short",
            {
                _total("whalepod_rank_running", "instance"): "{{instance}} running",
                _total("whalepod_rank_waiting", "instance"): "{{instance}} waiting",
            },
        ),
        Panel("Device blocks in use", "percentunit", {
            "sum by (instance) (whalepod_rank_kv_blocks_used{$here}) / (sum by (instance) "
            "(whalepod_rank_kv_blocks_used{$here}) + sum by (instance) (whalepod_rank_kv_blocks_free{$here}))":
                "{{instance}}",
        }),
        Panel("Steps", "s", _seconds("whalepod_rank_step_seconds", "phase")),
        Panel("Operations that ran slower versions", "ops", {
            _rate("whalepod_rank_kernel_fallbacks_total", "operation"): "{{operation}}",
        }),
        Panel("Rows of a step", "short", {
            f"{_rate('whalepod_rank_batch_rows_sum', 'phase')} / {_rate('whalepod_rank_batch_rows_count', 'phase')}":
                "{{phase}}",
        }),
        Panel("Tokens drawn", "ops", {_rate("whalepod_rank_generated_tokens_total", "instance"): "{{instance}}"}),
        Panel("Prompt rows still to compute", "short", {
            _total("whalepod_rank_prefill_tokens_queued", "instance"): "{{instance}}",
        }),
    ),
    "Images": (
        Panel("Images by where their rows were", "ops", {
            _rate("whalepod_vision_images_total", "source"): "vision: {{source}}",
            _rate("whalepod_rank_images_total", "source"): "ranks: {{source}}",
        }),
        Panel("Encoding", "s", _seconds("whalepod_vision_seconds")),
        Panel("Fetching and preparing", "s", _seconds("whalepod_router_image_prepare_seconds")),
    ),
}  # fmt: skip

KV: Rows = {
    "Hits": (
        Panel("Share of prompt tokens restored", "percentunit", {
            _share("whalepod_cached_tokens_total", "whalepod_prompt_tokens_total"): "restored",
        }),
        Panel("Prompt tokens by source", "ops", {_rate("whalepod_kv_tokens_total", "source"): "{{source}}"}),
        Panel("Lookups", "ops", {_rate("whalepod_kv_lookup_total", "result"): "{{result}}"}),
        Panel(
            "Promised and used",
            "ops",
            {
                _rate("whalepod_router_predicted_hit_tokens_total", "job"): "the lookup saw",
                _rate("whalepod_router_actual_hit_tokens_total", "job"): "the ranks used",
            },
        ),
        Panel("Rows computed again", "ops", {_rate("whalepod_rank_replayed_tokens_total", "job"): "replayed"}),
        Panel("Tokens that hits lost", "ops", {_rate("whalepod_kv_lost_tokens_sum", "reason"): "{{reason}}"}),
        Panel("From one use of a block to the next", "s", _seconds("whalepod_kv_reuse_interval_seconds")),
        Panel("Not worth reading", "ops", {_rate("whalepod_kv_fetch_not_worth_total", "job"): "left out"}),
    ),
    "Speed": (
        Panel("Value bytes", "Bps", {_rate("whalepod_kv_bytes_total", "dir"): "{{dir}}"}),
        Panel("Fetches", "s", _seconds("whalepod_kv_fetch_seconds", "class")),
        Panel("Stores", "s", _seconds("whalepod_kv_store_seconds", "class")),
        Panel("Lookup", "s", _seconds("whalepod_kv_lookup_seconds")),
        Panel("Bytes of an exchange", "bytes", {
            _share("whalepod_kv_exchange_bytes_sum", "whalepod_kv_exchange_bytes_count", "dir"): "{{dir}}",
        }),
        Panel("Waiting to be stored", "bytes", {_total("whalepod_kv_write_queue_bytes", "instance"): "{{instance}}"}),
        Panel("Estimated speed of a server", "Bps", {
            "avg by (shard) (whalepod_kv_read_bytes_per_second{$here})": "{{shard}}",
        }),
        Panel("Node cache in use", "percentunit", {
            "sum by (instance) (whalepod_kv_node_cache_blocks_used{$here}) / sum by (instance) "
            "(whalepod_kv_node_cache_blocks{$here})": "{{instance}}",
        }),
        Panel("Node cache evictions", "ops", {
            _rate("whalepod_kv_node_cache_evicted_total", "instance"): "{{instance}}",
        }),
    ),
    "Trouble": (
        Panel("The store answers lookups", "short", {
            "min by (instance) (whalepod_router_store_up{$here})": "{{instance}}",
        }),
        Panel("Servers not used", "percentunit", {
            _rate("whalepod_kv_breaker_open_seconds_total", "shard"): "{{shard}}",
        }),
        Panel("Values not stored", "ops", {_rate("whalepod_kv_write_dropped_total", "reason"): "{{reason}}"}),
        Panel(
            "Values refused",
            "ops",
            {
                _rate("whalepod_kv_value_refused_total", "reason"): "{{reason}}",
                _rate("whalepod_kv_checksum_error_total", "shard"): "checksum, {{shard}}",
                _rate("whalepod_kv_identity_mismatch_total", "job"): "another value's key",
            },
        ),
        Panel("Error replies", "ops", {
            _rate("whalepod_kv_error_total", "code"): "{{code}}",
            _rate("whalepod_kv_redirect_total", "kind"): "redirection: {{kind}}",
        }),
        Panel("Connections closed in doubt, servers suspected", "ops", {
            _rate("whalepod_kv_conn_discarded_total", "reason"): "{{reason}}",
            _rate("whalepod_kv_suspect_total", "shard"): "suspected: {{shard}}",
        }),
    ),
    "What is stored (told by the KV service)": (
        Panel("Values", "short", {"max by (kind) (whalepod_kv_stored_values{$here})": "{{kind}}"}),
        Panel("Bytes", "bytes", {"max by (kind) (whalepod_kv_stored_bytes{$here})": "{{kind}}"}),
        Panel("Tenants who have most", "bytes", {
            "topk(10, max by (owner) (whalepod_kv_owner_bytes{$here}))": "{{owner}}",
        }),
        Panel("Memory of the servers", "percentunit", {
            "max(whalepod_kv_memory_bytes{$here}) / max(whalepod_kv_memory_max_bytes{$here} > 0)": "in use",
        }),
        Panel("Fragmentation of the worst server", "short", {
            "max(whalepod_kv_fragmentation_ratio{$here})": "ratio",
        }),
        Panel("Removed blocks", "ops", {_rate("whalepod_kv_removed_total", "reason"): "{{reason}}"}),
        Panel("Still to be evicted", "bytes", {"max(whalepod_kv_evictor_lag_bytes{$here})": "above the low mark"}),
        Panel("Age of removed blocks", "s", _seconds("whalepod_kv_removed_age_seconds", "reason")),
    ),
}  # fmt: skip

SPECULATION: Rows = {
    "Drafts": (
        Panel("Drafts that stood, of those verified", "percentunit", {
            _share("whalepod_rank_dspark_accepted_total", "whalepod_rank_dspark_verified_total", "column"):
                "column {{column}}",
        }),
        Panel("Tokens a request gets in a step", "short", {
            _share("whalepod_rank_dspark_accepted_length_sum", "whalepod_rank_dspark_request_steps_total"): "mean",
        }),
        Panel("Requests of a step by the tokens they got", "percentunit", {
            f"{_rate('whalepod_rank_dspark_accepted_length_bucket', 'le')} / on () group_left sum("
            "rate(whalepod_rank_dspark_accepted_length_count{$here}[$__rate_interval]))": "at most {{le}}",
        }),
        Panel("Drafts that a step is to verify", "short", {
            _total("whalepod_rank_dspark_budget", "instance"): "{{instance}}",
        }),
        Panel("Confidence and truth", "percentunit", {
            _share("whalepod_rank_dspark_confidence_total", "whalepod_rank_dspark_verified_total", "column"):
                "expected, column {{column}}",
            _share("whalepod_rank_dspark_accepted_total", "whalepod_rank_dspark_verified_total", "column"):
                "stood, column {{column}}",
        }, note="Lines of one column that lie apart: calibrate again (docs/dspark.md)."),
        Panel("Drafted and verified", "ops", {
            _rate("whalepod_rank_dspark_drafted_total", "job"): "drafted",
            _rate("whalepod_rank_dspark_verified_total", "job"): "verified",
            _rate("whalepod_rank_dspark_accepted_total", "job"): "stood",
        }),
        Panel("A round of drafting", "s", _seconds("whalepod_rank_dspark_draft_seconds")),
        Panel("Steps by how much was verified", "ops", {
            _rate("whalepod_rank_dspark_steps_total", "verified"): "{{verified}}",
        }),
    ),
    "Experts": (
        Panel("Balancedness", "percentunit", {
            "min by (job, pool) (whalepod_eplb_balancedness{$here})": "{{job}} {{pool}}",
        }),
        Panel("Ranks of a group", "short", {
            "min by (job, pool) (whalepod_expert_group_ranks{$here})": "{{job}} {{pool}}",
            "max by (job, pool) (whalepod_expert_group_ranks_wanted{$here})": "{{job}} {{pool}} wanted",
        }),
        Panel("A rank's part of a step", "s", {"max by (rank) (whalepod_expert_step_seconds{$here})": "rank {{rank}}"}),
        Panel("Groups formed anew, experts moved", "ops", {
            _rate("whalepod_expert_group_reforms_total", "instance"): "{{instance}} formed",
            _rate("whalepod_expert_rebalances_total", "instance"): "{{instance}} moved",
        }),
        Panel("Steps without rows", "ops", {_rate("whalepod_expert_dummy_steps_total", "instance"): "{{instance}}"}),
        Panel("Rows that unequal batches waste", "percentunit", {
            "max by (job, pool) (whalepod_expert_padded_share{$here})": "{{job}} {{pool}}",
        }),
    ),
    "Divided prompts": (
        Panel("Rows of prompts on heads of groups", "short", {_rate("whalepod_context_rows_total", "how"): "{{how}}"}),
        Panel("State sent to the others", "Bps", {
            _rate("whalepod_context_copied_bytes_total", "instance"): "{{instance}}",
        }),
        Panel("Blocks that the others were to store", "ops", {
            _rate("whalepod_context_blocks_entrusted_total", "instance"): "{{instance}}",
        }),
        Panel("Ranks that divide prompts", "short", {
            "min by (instance) (whalepod_context_group_ranks{$here})": "{{instance}}",
            "max(whalepod_context_group_ranks_wanted{$here})": "wanted",
        }),
        Panel("Groups of prompts formed anew", "ops", {
            _rate("whalepod_context_group_reforms_total", "instance"): "{{instance}}",
        }),
    ),
    "N-grams": (
        Panel("Rows read", "ops", {_rate("whalepod_rank_engram_rows_total", "instance"): "{{instance}}"}),
        Panel("Pages that were not in memory", "ops", {
            _rate("whalepod_rank_engram_cold_pages_total", "instance"): "{{instance}}",
            _rate("whalepod_rank_engram_ahead_pages_total", "instance"): "{{instance}} ahead",
        }),
    ),
}  # fmt: skip

DASHBOARDS: Mapping[str, tuple[str, Rows]] = {
    "cluster": ("Whalepod: cluster", CLUSTER),
    "kv": ("Whalepod: KV store", KV),
    "speculation": ("Whalepod: speculation and experts", SPECULATION),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(name: str) -> dict[str, Any]:
    title, rows = DASHBOARDS[name]
    return {
        "uid": f"whalepod-{name}",
        "title": title,
        "tags": ["whalepod"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["whalepod"], "title": "Whalepod", "includeVars": True, "keepTime": True}
        ],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
                _variable("namespace", "label_values(whalepod_router_store_up, namespace)"),
                _variable("job", 'label_values({__name__=~"whalepod_.*", namespace=~"$namespace"}, job)'),
            ]
        },
        "panels": list(_panels(rows)),
    }


def queries(name: str) -> list[str]:
    """Every expression of a dashboard."""
    return [query for panels in DASHBOARDS[name][1].values() for panel in panels for query in panel.queries]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Rows) -> Iterator[dict[str, Any]]:
    y, number = 0, 0
    for title, panels in rows.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            place = {"x": WIDTH * (index % COLUMNS), "y": y + HEIGHT * (index // COLUMNS), "w": WIDTH, "h": HEIGHT}
            yield {
                "id": number,
                "type": panel.kind,
                "title": panel.title,
                "description": panel.note,
                "datasource": SOURCE,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(65 + at),
                        "datasource": SOURCE,
                        "expr": query.replace("$here", HERE),
                        "legendFormat": legend,
                    }
                    for at, (query, legend) in enumerate(panel.queries.items())
                ],
            }
        y += HEIGHT * -(-len(panels) // COLUMNS)


def dashboard_text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"
