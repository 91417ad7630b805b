"""Sharing domains are remembered from one request to the next, and never taken for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import FakeDecode
from tests.services.router.router_under_test import running_router
from whalepod.services.router import front_door


async def test_a_request_has_the_salt_of_its_tenant_user_cache_salt_and_purge(
    model_dir: Path, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when more domains have asked than are remembered."""
    monkeypatch.setattr(front_door, "DOMAINS_MAX", 3)
    epochs = {"a": 0, "b": 0}
    asked: list[tuple[object, ...]] = []
    settings: dict[str, Any] = {"trust_tenant_header": True}
    async with running_router(
        model_dir, [decode], prefill_replicas=0, purge_epoch=lambda tenant: epochs[tenant], **settings
    ) as router:
        for epoch in (0, 1, 1):
            epochs["a"] = epoch
            for tenant in ("a", "b"):
                for user in (None, "a", "u"):
                    for salt in (None, "a", "s"):
                        body = {"prompt": [401], "max_tokens": 1, "user": user, "cache_salt": salt}
                        answer = await router.http.post("/v1/completions", json=body, headers={"x-tenant-id": tenant})
                        assert answer.status_code == 200, answer.text
                        asked.append((tenant, user, salt, epochs[tenant]))
    salts = [ticket.salt for ticket in decode.seen.tickets]
    assert len(set(zip(asked, salts, strict=True))) == len(set(asked)) == len(set(salts)) == 27
