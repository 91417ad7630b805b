"""The dashboard in a real browser, beside a cluster of real processes under load. Debian's Chromium; pictures of it are
kept where WHALEPOD_ARTEFACTS says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.chromium import CHROMIUM, FLAGS, MISSING
from tests.e2e.served_cluster import ServedCluster, served_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]

PROMPT = "The whale sings in the deep water of the north. " * 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """Two decode ranks, and four clients that ask all the time."""
    flags = ("--log-level", "error", "--decode-replicas", "2")
    with served_cluster(tmp_path_factory.mktemp("serve"), *flags) as served:
        stop = threading.Event()
        clients = [threading.Thread(target=_ask, args=(served, stop, number)) for number in range(4)]
        for client in clients:
            client.start()
        yield served
        stop.set()
        for client in clients:
            client.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def _ask(cluster: ServedCluster, stop: threading.Event, number: int) -> None:
    body = {"prompt": f"{PROMPT}{number}", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    with cluster.client() as client:
        while not stop.is_set():
            client.post("/v1/completions", json=body)


def opened(browser: Any, cluster: ServedCluster, scheme: str, width: int) -> tuple[Any, list[str]]:
    """The page, and what it complained of so far."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{cluster.url}/dashboard")
    expect(page.locator("#state")).to_have_text("ready", timeout=20_000)
    return page, complaints


def keep_picture(page: Any, name: str) -> None:
    if directory := os.environ.get("WHALEPOD_ARTEFACTS"):
        page.screenshot(path=Path(directory) / f"{name}.png", full_page=True)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_numbers_move_and_nothing_is_complained_of(
    browser: Any, cluster: ServedCluster, scheme: str, width: int
) -> None:
    page, complaints = opened(browser, cluster, scheme, width)
    expect(page.locator("#ranks tbody tr")).to_have_count(3)
    expect(page.locator("#open tbody")).to_contain_text("completions", timeout=15_000)
    expect(page.locator("#open tbody")).to_contain_text("generating", timeout=15_000)
    expect(page.locator("#tiers tbody")).to_contain_text("node cache", timeout=15_000)
    expect(page.locator("#tiers tbody")).to_contain_text("MiB", timeout=15_000)
    expect(page.locator("#sources tbody")).to_contain_text("%", timeout=15_000)
    expect(page.locator("#told")).to_contain_text("Read-only")
    page.locator("details summary").click()
    expect(page.locator("#settings tbody")).to_contain_text("decode.replicas")
    tokens = page.locator("#charts section", has_text="Tokens a second").locator(".key b").first
    expect(tokens).not_to_have_text("0", timeout=20_000)
    served = page.locator("#outcomes tbody td").nth(1)
    before = served.inner_text()
    expect(served).not_to_have_text(before, timeout=20_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it fits a phone"
    keep_picture(page, f"dashboard-{scheme}-{width}")
    assert complaints == []


def test_the_tables_are_reached_by_the_keyboard(browser: Any, cluster: ServedCluster) -> None:
    page, _ = opened(browser, cluster, "light", 390)
    reached: set[str] = set()
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
    assert {"Ranks", "Requests in flight"} <= reached


def test_a_killed_decode_rank_is_gone_within_three_seconds_and_comes_back(browser: Any, cluster: ServedCluster) -> None:
    page, complaints = opened(browser, cluster, "light", 1280)
    ranks = page.locator("#ranks tbody")
    expect(ranks).to_contain_text("decode-1", timeout=20_000)
    cluster.kill_on_port(cluster.config.decode.port + 1)
    expect(ranks).not_to_contain_text("decode-1", timeout=3_000)
    keep_picture(page, "dashboard-rank-lost")
    expect(ranks).to_contain_text("decode-1", timeout=60_000)
    assert complaints == []
