"""Rules and dashboards ask for series that exist, and say what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from tests.deploy.generated_files import generated_files
from tests.deploy.grafana import DASHBOARDS, dashboard, queries
from tests.deploy.known_series import known_series
from tests.deploy.live_series import check_rules, figures
from tests.deploy.prometheus_rules import ALERTS, FAILED, RECORDED
from tests.deploy.rendering import of_kind, render
from tests.docs_tables import DeclaredMetric
from tests.house_rules import ROOT
from whalepod.cluster.error_codes import ERROR_CODES

LABELS_OF_TARGETS = {"namespace", "job", "instance", "pod", "pool", "le"}
"""Labels that the scrape adds, and the one that every histogram has."""


@pytest.fixture(scope="module")
def known() -> Mapping[str, DeclaredMetric]:
    return known_series()


def expressions() -> Iterator[str]:
    yield from RECORDED.values()
    yield from (alert["expr"] for alert in ALERTS)
    for name in DASHBOARDS:
        yield from queries(name)


def unknown_series(asked: Iterable[str], known: Mapping[str, DeclaredMetric]) -> set[str]:
    names = {name for query in asked for name in re.findall(r"\bwhalepod[_:][a-z0-9_:]+", query)}
    return {name for name in names if name not in known and name not in RECORDED}


def unknown_labels(query: str, known: Mapping[str, DeclaredMetric]) -> set[str]:
    """Labels that a query groups or selects by, and none of its series has."""
    names = re.findall(r"\bwhalepod_[a-z0-9_]+", query)
    grouped = {label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in group.split(",")}
    selected = set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", query))
    had = {label for name in names if name in known for label in known[name].labels}
    return (grouped | selected) - had - LABELS_OF_TARGETS - {""}


def test_every_rule_and_panel_asks_for_series_and_labels_that_exist(known: Mapping[str, DeclaredMetric]) -> None:
    asked = list(expressions())
    assert len(asked) > 90
    assert unknown_series(asked, known) == set()
    assert {
        query: labels for query in asked if (labels := unknown_labels(query, known)) and "whalepod:" not in query
    } == {}


def test_a_series_or_a_label_that_does_not_exist_is_noticed(known: Mapping[str, DeclaredMetric]) -> None:
    assert unknown_series(["rate(whalepod_requests[5m])"], known) == {"whalepod_requests"}
    assert unknown_labels("sum by (outcom) (whalepod_requests_total)", known) == {"outcom"}
    assert unknown_labels('whalepod_router_ranks{rolle="decode"}', known) == {"rolle"}


def test_failed_outcomes_are_kinds_of_errors() -> None:
    assert set(FAILED.split("|")) <= {*ERROR_CODES, "queue_full"}


def test_every_alert_has_a_section_in_the_runbook() -> None:
    page = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^### (Whalepod\w+)$", page, flags=re.MULTILINE))
    assert sections == {alert["alert"] for alert in ALERTS}
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: path.name)
def test_generated_files_are_what_the_code_makes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == generated_files()[path], "run `make docs`"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_names_places_and_legends_of_their_own(name: str) -> None:
    panels = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for panel in panels:
        targets = panel.get("targets", [])
        assert panel["type"] == "row" or targets
        assert len({target["legendFormat"] for target in targets}) == len(targets), panel["title"]
        assert all("$here" not in target["expr"] for target in targets)


def test_every_metric_of_a_rank_and_of_a_router_is_on_a_dashboard_or_left_out_on_purpose(
    known: Mapping[str, DeclaredMetric],
) -> None:
    left_out = ("whalepod_canary_", "vllm:", "sglang:")
    said_otherwise = {
        "whalepod_rank_cached_tokens_total", "whalepod_rank_finished_total", "whalepod_rank_handoffs_total",
        "whalepod_rank_slots", "whalepod_rank_vision_failures_total", "whalepod_expert_group_epoch",
        "whalepod_router_images_total", "whalepod_router_images_ahead_total", "whalepod_router_prefix_wait_seconds",
        "whalepod_router_usage_records_dropped_total", "whalepod_vision_batch_images", "whalepod_vision_batch_seconds",
        "whalepod_vision_forgotten_total",
    }  # fmt: skip
    text = " ".join(query for name in DASHBOARDS for query in queries(name))
    shown = {known[name].name for name in re.findall(r"\bwhalepod_[a-z0-9_]+", text)}
    all_names = {metric.name for metric in known.values() if not metric.name.startswith(left_out)}
    assert all_names - shown == said_otherwise


def test_the_chart_ships_the_rules_and_the_dashboards() -> None:
    values = {"monitoring": {name: {"enabled": True} for name in ("prometheusRule", "dashboards")}}
    manifests = render(values)
    (rule,) = of_kind(manifests, "PrometheusRule")
    assert [len(group["rules"]) for group in rule["spec"]["groups"]] == [len(RECORDED), len(ALERTS)]
    (boards,) = (m for m in of_kind(manifests, "ConfigMap") if m["metadata"]["name"].endswith("-dashboards"))
    assert {json.loads(text)["uid"] for text in boards["data"].values()} == {f"whalepod-{name}" for name in DASHBOARDS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus)")
def test_promtool_takes_the_rules_and_their_unit_tests_pass(tmp_path: Path) -> None:
    check_rules(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_finds_every_series_and_labels_stay_few(tmp_path: Path) -> None:
    found = figures(tmp_path, Console(soft_wrap=True))
    assert found["series_missing"] == 0
    assert found["label_values_max"] <= 50, "1,000 are allowed, and no label of ours comes from a client"
