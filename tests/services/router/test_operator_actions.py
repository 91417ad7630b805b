"""What operators may change at a router: with a key, and from no other site's page. In a real browser, too."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.chromium import CHROMIUM, FLAGS, MISSING
from tests.own_ports import with_own_ports
from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest, router_config, running_router, until
from tests.services.router.test_process import registered, running, until_ready
from whalepod.cluster.api_keys import Scope, add_api_key
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.services.router.other_processes import RELAYED_HEADER

PROMPT = list(range(400, 440))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_no_other_sites_page_changes_anything(
    router: RouterUnderTest, headers: dict[str, str], status: int
) -> None:
    """Without keys, a browser of somebody who can reach the router would be all that it takes."""
    assert (await router.http.post("/workers", json={"rank": "decode-0"}, headers=headers)).status_code == status
    assert (await router.http.delete("/workers/decode-0", headers=headers)).status_code == status
    own = {"origin": f"http://127.0.0.1:{router.http_port}"}
    assert (await router.http.post("/workers", json={"rank": "decode-0"}, headers=own)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("[::1]:{port}", 200),
        ("gpu-box", 200),
        ("ops.whale.example:{port}", 200),
        ("OPS.whale.example", 200),
        ("rebound.example:{port}", 403),
        ("rebound.example", 403),
        ("127.0.0.1.rebound.example:{port}", 403),
        ("rebound.:{port}", 403),
        ("ops.whale.example.rebound.example", 403),
    ],
)
async def test_a_browser_that_a_strangers_name_led_here_changes_nothing_without_a_key(
    model_dir: Path, host: str, status: int
) -> None:
    """Its page was loaded from there before the name led here, so to the browser it is the same site."""
    async with running_router(
        model_dir, [FakeDecode(), FakePrefill()], operator_hosts=("ops.whale.example",)
    ) as router:
        host = host.format(port=router.http_port)
        for headers in {"origin": f"http://{host}"}, {"origin": f"http://{host}", "sec-fetch-site": "same-origin"}:
            asked = {"host": host, **headers}
            answer = await router.http.post("/workers", json={"rank": "decode-0"}, headers=asked)
            assert answer.status_code == status, answer.text
            assert (await router.http.delete("/workers/decode-0", headers=asked)).status_code == status
        assert (await router.http.post("/workers", json={"rank": "decode-0"}, headers={"host": host})).is_success


async def test_what_is_changed_at_one_process_of_a_router_is_changed_at_all(model_dir: Path) -> None:
    async with running_router(model_dir, [FakeDecode(), FakePrefill()]) as other:
        ranks, url = [FakeDecode(), FakePrefill()], f"http://127.0.0.1:{other.http_port}"
        async with running_router(model_dir, ranks, other_processes=[url]) as asked:

            def decode_ranks() -> list[int]:
                return [len(one.front.table.decode_ranks()) for one in (asked, other)]

            assert (await asked.http.delete("/workers/decode-0", headers={RELAYED_HEADER: "1"})).is_success
            assert decode_ranks() == [0, 1], "what was relayed goes no further"
            assert (await asked.http.delete("/workers/decode-0")).is_success
            assert decode_ranks() == [0, 0]
            assert (await asked.http.post("/workers", json={"rank": "decode-0"})).is_success
            assert decode_ranks() == [1, 1]


async def test_a_process_that_was_not_reached_is_named(model_dir: Path) -> None:
    with socket.socket() as taken:  # where nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with running_router(model_dir, [FakeDecode(), FakePrefill()], other_processes=[url]) as router:
            answer = await router.http.delete("/workers/decode-0")
            assert (answer.status_code, url in answer.text) == (503, True)
            assert not router.front.table.decode_ranks(), "here it is done"


async def test_a_router_without_keys_purges_for_nobody(router: RouterUnderTest) -> None:
    refused = await router.http.post("/purge", json={"tenant": "acme"})
    assert refused.status_code == 403
    assert "router.api_keys_file" in refused.json()["error"]["message"]


class Operated:
    """A router process with keys, an operators' port, and a Redis of its own."""

    def __init__(self, model_dir: Path, directory: Path) -> None:
        file = directory / "keys.yaml"
        names: dict[Scope, str] = {"generate": "ci", "admin": "ops"}
        self.keys = {
            scope: add_api_key(file, name=name, tenant="acme", scopes=frozenset({scope}), expires=None)
            for scope, name in names.items()
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.config: ClusterConfig = with_own_ports(router_config(model_dir, api_keys_file=file, admin_port=port))
        self.redis = EmbeddedRedis(EmbeddedRedisSettings(port=self.config.redis_port, memory_bytes=32 << 20))

    def operator(self, scope: Scope | None) -> httpx.AsyncClient:
        headers = {} if scope is None else {"authorization": f"Bearer {self.keys[scope]}"}
        return httpx.AsyncClient(base_url=self.config.operator_url, headers=headers, timeout=20.0, trust_env=False)


@pytest.fixture
def operated(model_dir: Path, tmp_path: Path) -> Operated:
    return Operated(model_dir, tmp_path)


async def test_on_the_operators_port_reading_is_free_and_changes_want_a_key(operated: Operated) -> None:
    await asyncio.to_thread(operated.redis.start)
    decode = FakeDecode()
    try:
        async with registered(operated.config, [decode, FakePrefill()]), running(operated.config) as client:
            cases: list[tuple[Scope | None, int]] = [(None, 401), ("generate", 403), ("admin", 200)]
            for scope, status in cases:
                async with operated.operator(scope) as operator:
                    await until_ready(operator)
                    assert (await operator.get("/workers")).status_code == 200
                    assert (await operator.delete("/workers/prefill-0")).status_code == status
                    assert (await operator.post("/workers", json={"rank": "prefill-0"})).status_code == status
                    assert (await operator.get("/dashboard/key")).status_code == status
                    before = await _salt(client, decode, operated.keys["generate"])
                    assert (await operator.post("/purge", json={"tenant": "acme"})).status_code == status
                    after = await _salt(client, decode, operated.keys["generate"])
                    assert (before != after) == (status == 200), "what was stored before is out of reach"
            async with operated.operator("admin") as operator:
                for wrong in ({}, {"tenant": ""}, {"tenant": "x" * 129}):
                    assert (await operator.post("/purge", json=wrong)).status_code == 400
                await asyncio.to_thread(operated.redis.stop)
                lost = await operator.post("/purge", json={"tenant": "acme"})
                assert (lost.status_code, "cannot be written down" in lost.text) == (503, True)
    finally:
        await asyncio.to_thread(operated.redis.stop)


async def _salt(client: httpx.AsyncClient, decode: FakeDecode, key: str) -> bytes:
    answer = await client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text
    return decode.seen.tickets[-1].salt


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
async def test_an_operator_drains_and_purges_by_keyboard_with_a_key_and_nobody_without(operated: Operated) -> None:
    await asyncio.to_thread(operated.redis.start)
    ranks = [FakeDecode("decode-0"), FakeDecode("decode-1"), FakePrefill()]
    try:
        async with registered(operated.config, ranks), running(operated.config), async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            complaints: list[str] = []
            page.on("pageerror", lambda error: complaints.append(str(error)))
            await page.goto(f"{operated.config.operator_url}/dashboard")
            await expect(page.locator("#state")).to_have_text("ready", timeout=20_000)
            await expect(page.locator("#told")).to_contain_text("Read-only")
            await expect(page.locator("#ranks button")).to_have_count(0)
            for key, why in (("wrong", "not known"), (operated.keys["generate"], "not for admin")):
                await _show_key(page, key)
                await expect(page.locator("#told")).to_contain_text(why)
                await expect(page.locator("#ranks button")).to_have_count(0)
            await _show_key(page, operated.keys["admin"])
            await expect(page.locator("#told")).to_contain_text("ops")
            await _drain_and_put_back(page)
            await _purge(page, operated)
            await _keep(page, "dashboard-operator")
            await page.get_by_role("button", name="Forget the key").click()
            await expect(page.locator("#ranks button")).to_have_count(0)
            assert await page.evaluate("sessionStorage.length") == 0
            assert complaints == []
            await browser.close()
    finally:
        await asyncio.to_thread(operated.redis.stop)


async def _show_key(page: Page, key: str) -> None:
    await page.get_by_label("An operator's API key").fill(key)
    await page.keyboard.press("Enter")


async def _drain_and_put_back(page: Page) -> None:
    row = page.locator("#ranks tbody tr", has_text="decode-1")
    await expect(row.get_by_role("button")).to_have_text("Drain")
    for _ in range(30):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Drain decode-1":
            break
    await page.keyboard.press("Enter")
    await expect(row).to_contain_text("draining", timeout=5_000)
    await expect(page.locator("#told")).to_contain_text("decode-1 gets no new work")
    await page.wait_for_timeout(2_500)
    assert await page.evaluate("document.activeElement.textContent") == "Put back", "the focus stays, whatever moves"
    await page.keyboard.press("Enter")
    await expect(row).to_contain_text("serving", timeout=5_000)


async def _purge(page: Page, operated: Operated) -> None:
    answers: list[str] = []

    async def confirm(dialog: Any) -> None:
        answers.append(dialog.message)
        await dialog.accept()

    page.on("dialog", confirm)
    field = page.get_by_label("Purge what a tenant has stored")
    await field.fill("acme")
    await page.keyboard.press("Enter")
    await expect(page.locator("#told")).to_contain_text("what acme had stored is out of reach")
    assert len(answers) == 1
    await asyncio.to_thread(operated.redis.stop)
    await field.fill("acme")
    await page.keyboard.press("Enter")
    await expect(page.locator("#told")).to_contain_text("cannot be written down", timeout=15_000)
    await until(lambda: len(answers) == 2)


async def _keep(page: Page, name: str) -> None:
    if directory := os.environ.get("WHALEPOD_ARTEFACTS"):
        await page.screenshot(path=Path(directory) / f"{name}.png", full_page=True)
