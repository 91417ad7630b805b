"""The dashboard's page and its events: what is told, to whom, and that nobody's text is in it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import FakeDecode
from tests.services.router.router_under_test import RouterUnderTest, until
from whalepod.cluster.config import ClusterConfig
from whalepod.services.router.dashboard_sources import shown_settings
from whalepod.services.router.rank_numbers import metrics_url, parse_numbers

PAGE = Path(__file__).parents[3] / "services/router/dashboard.html"


async def snapshots(router: RouterUnderTest, count: int) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    async with router.http.stream("GET", "/dashboard/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                told.append(json.loads(line.removeprefix("data: ")))
            if len(told) == count:
                break
    return told


async def test_the_page_needs_nothing_from_elsewhere(router: RouterUnderTest) -> None:
    response = await router.http.get("/dashboard")
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]*)"|url\(([^)]*)\)|@import', response.text)
    assert {first or second for first, second in links} == {"data:,"}
    assert "innerHTML" not in response.text, "what is shown is put in as text"
    assert response.text == PAGE.read_text(encoding="utf-8")


async def test_numbers_move_with_requests_and_hold_no_text(router: RouterUnderTest) -> None:
    (before,) = await snapshots(router, 1)
    await router.complete(prompt="a secret whale", max_tokens=2)
    _, after = await snapshots(router, 2)
    assert {rank["rank"] for rank in after["ranks"]} == {"decode-0", "prefill-0"}
    assert after["readiness"]["status"] == "ready"
    assert sum(after["counters"]["requests"].values()) == sum(before["counters"]["requests"].values()) + 1
    assert after["histograms"]["first_token"][-1][1] == before["histograms"]["first_token"][-1][1] + 1
    assert "secret whale" not in json.dumps(after)


async def test_a_request_in_flight_is_told_with_its_state_and_not_its_text(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.behaviour.step = asyncio.Event()
    running = asyncio.create_task(router.complete(prompt="a secret whale", max_tokens=3))
    await until(lambda: decode.live)
    (before,) = await snapshots(router, 1)
    assert [(each["state"], each["tokens"]) for each in before["requests"]] == [("prompt", 0)]
    decode.behaviour.step.set()
    await running
    _, after = await snapshots(router, 2)
    assert after["requests"] == []


async def test_a_drained_rank_is_told_as_such(router: RouterUnderTest) -> None:
    await router.http.delete("/workers/decode-0")
    (told,) = await snapshots(router, 1)
    assert [(rank["draining"], rank["leaving"]) for rank in told["ranks"]] == [(True, False), (False, False)]


def test_settings_are_shown_without_secrets() -> None:
    config = ClusterConfig.model_validate(
        {
            "secret": "x" * 32,
            "redis_url": "redis://:hush@redis:6379/0",
            "kv": {"urls": ["redis://me:hush@a:1/0", "redis://b:1/0"]},
            "router": {"queue_size": 7},
        }
    )
    told = shown_settings(config)
    assert told["router.queue_size"] == "7"
    assert told["redis_url"] == "redis://…@redis:6379/0"
    assert told["kv.urls"] == "['redis://…@a:1/0', 'redis://b:1/0']"
    assert not any("hush" in value or "xxx" in value for value in told.values())


async def test_a_rank_that_dies_is_gone_within_three_seconds(router: RouterUnderTest, decode: FakeDecode) -> None:
    await router.complete(max_tokens=1)
    await decode.server.kill()
    told = (await snapshots(router, 3))[-1]
    assert "decode-0" not in {rank["rank"] for rank in told["ranks"]}
    assert told["readiness"]["reasons"] == ["no decode rank is usable"]


@pytest.mark.parametrize("palette", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(palette: int) -> None:
    """By WCAG 2 AA, 4.5 to 1."""
    rules = re.findall(r":root \{(.*?)\}", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", rules[palette]))
    for text in ("ink", "soft", "one", "two", "three", "bad"):
        for behind in ("card", "paper"):
            dark, light = sorted(luminance(colors[name]) for name in (text, behind))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, behind)


def luminance(color: str) -> float:
    """Relative, 0 to 1, of #rrggbb."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_top_asks_once_and_leaves(router: RouterUnderTest, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whalepod", "top", "--once", "--url", f"http://127.0.0.1:{router.http_port}"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=tmp_path)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"decode-0" in output


def test_numbers_of_a_rank_are_read_from_its_metrics() -> None:
    page = (
        "# TYPE whalepod_rank_dspark_verified_total counter\n"
        'whalepod_rank_dspark_verified_total{column="1"} 10.0\nwhalepod_rank_dspark_verified_total{column="2"} 5.0\n'
        "whalepod_eplb_balancedness 0.75\nwhalepod_rank_waiting 3.0\nwhalepod_expert_group_ranks strange\n"
        'whalepod_kv_tokens_total{source="store"} 640.0\nwhalepod_kv_tokens_total{source="node"} 64.0\n'
    )
    told = parse_numbers(page)
    assert told.numbers == {"drafts_verified": 15.0, "balancedness": 0.75}
    assert told.tokens_by_source == {"store": 640.0, "node": 64.0}
    assert metrics_url("[fd00::1]:8200") == "http://[fd00::1]:9200/metrics"
    assert metrics_url("10.0.0.1:8207") == "http://10.0.0.1:9207/metrics"
