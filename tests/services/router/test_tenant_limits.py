"""Each tenant has its own limits, and hears after what time it may come again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.router.fake_ranks import FakeDecode
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.services.router.tenant_limits import Limits, TenantLimitError, TenantLimits


class SetClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(1000 * self.now_s)


def refusal(limits: TenantLimits, tenant: str, *, requests: int = 1) -> float | None:
    with pytest.raises(TenantLimitError) as caught:
        limits.enter(tenant, requests=requests)
    return caught.value.retry_after_s


def test_requests_are_limited_by_tenant_and_come_back_evenly() -> None:
    clock = SetClock()
    limits = TenantLimits(Limits(requests_per_minute=6), clock=clock)
    for _ in range(6):
        limits.enter("a", requests=1)
    assert refusal(limits, "a") == 10.0
    limits.enter("b", requests=6)
    clock.now_s += 10.0
    limits.enter("a", requests=1)
    assert refusal(limits, "a") == 10.0


def test_tokens_are_taken_when_they_are_known_and_a_debt_is_waited_for() -> None:
    clock = SetClock()
    limits = TenantLimits(Limits(tokens_per_minute=600), clock=clock)
    limits.enter("a", requests=1)
    limits.charge_tokens("a", 900)
    assert refusal(limits, "a") == 31.0  # 300 below zero, and one more: 30.1 s
    limits.enter("b", requests=1)
    clock.now_s += 31.0
    limits.enter("a", requests=1)


def test_requests_at_a_time_are_limited_until_they_leave() -> None:
    limits = TenantLimits(Limits(concurrent_max=2), clock=SetClock())
    limits.enter("a", requests=2)
    assert refusal(limits, "a") == 1.0
    limits.enter("b", requests=1)
    limits.leave("a", requests=2)
    limits.enter("a", requests=5)  # more than the limit: alone


def test_without_limits_everything_passes() -> None:
    limits = TenantLimits(Limits(), clock=SetClock())
    for _ in range(1000):
        limits.enter("a", requests=10)
        limits.charge_tokens("a", 1_000_000)


async def test_a_limit_is_429_with_retry_after_and_other_tenants_are_served(
    model_dir: Path, decode: FakeDecode
) -> None:
    settings: dict[str, Any] = {"tenant_requests_per_minute": 2, "trust_tenant_header": True}
    async with running_router(model_dir, [decode], prefill_replicas=0, **settings) as router:

        async def ask(tenant: str) -> httpx.Response:
            body = {"prompt": [401], "max_tokens": 1}
            return await router.http.post("/v1/completions", json=body, headers={"x-tenant-id": tenant})

        assert [(await ask("a")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask("a")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await ask("b")).status_code == 200


@pytest.mark.parametrize("priority", ["high", 2**40, 1.5])
async def test_a_priority_that_is_none_is_named(router: RouterUnderTest, priority: object) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": [401], "priority": priority})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"


@pytest.mark.parametrize(("least", "asked", "given"), [(None, -5, -5), (0, -(2**31), 0), (-3, -5, -3), (-3, 7, 7)])
async def test_a_priority_goes_only_as_far_as_the_operator_lets_it(
    model_dir: Path, decode: FakeDecode, least: int | None, asked: int, given: int
) -> None:
    async with running_router(model_dir, [decode], prefill_replicas=0, priority_min=least) as router:
        body = {"prompt": [401], "max_tokens": 1, "priority": asked}
        assert (await router.http.post("/v1/completions", json=body)).status_code == 200
        (ticket,) = decode.seen.tickets
        assert ticket.priority == given
