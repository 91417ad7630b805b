"""Who has a key is served, as its tenant; who has none is told how to show one; a key taken back stops working."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import FakeDecode
from tests.services.router.router_under_test import RouterUnderTest, running_router, until
from whalepod.client import AsyncClient
from whalepod.cluster.api_keys import Scope, add_api_key, remove_api_key
from whalepod.core.errors import AuthenticationError
from whalepod.services.router import authentication

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "thinking": {"type": "disabled"},
    "max_tokens": 2,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.fixture
def keys(keys_file: Path) -> dict[str, str]:
    def add(name: str, tenant: str, scope: Scope, expires: date | None = None) -> str:
        return add_api_key(keys_file, name=name, tenant=tenant, scopes=frozenset({scope}), expires=expires)

    return {
        "acme": add("acme-ci", "acme", "generate"),
        "other": add("other-ci", "other", "generate"),
        "ops": add("ops", "acme", "admin"),
        "old": add("old", "acme", "generate", date(2020, 1, 1)),
    }


@pytest.fixture
async def locked(
    model_dir: Path, decode: FakeDecode, keys_file: Path, keys: dict[str, str], tmp_path: Path
) -> AsyncIterator[RouterUnderTest]:
    settings: dict[str, Any] = {"api_keys_file": keys_file, "usage_file": tmp_path / "usage.jsonl"}
    async with running_router(model_dir, [decode], prefill_replicas=0, **settings) as router:
        yield router


@pytest.mark.parametrize("path", BODIES)
async def test_every_endpoint_wants_a_key_and_takes_it_in_either_header(
    locked: RouterUnderTest, decode: FakeDecode, keys: dict[str, str], path: str
) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": keys["acme"]}):
        response = await locked.http.post(path, json=BODIES[path], headers=headers)
        assert response.status_code == 401, headers
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
    assert decode.seen.starts == []
    for headers in ({"authorization": f"bearer {keys['acme']}"}, {"x-api-key": keys["acme"]}):
        assert (await locked.http.post(path, json=BODIES[path], headers=headers)).status_code == 200


async def test_a_key_is_asked_for_before_a_body_is_read(locked: RouterUnderTest) -> None:
    response = await locked.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 401


async def test_the_key_says_which_tenant_it_is_and_nothing_else_does(
    locked: RouterUnderTest, decode: FakeDecode, keys: dict[str, str]
) -> None:
    for name in ("acme", "other"):
        headers = {"authorization": f"Bearer {keys[name]}", "x-tenant-id": "acme"}
        body = {"prompt": "a", "max_tokens": 1, "user": "u"}
        assert (await locked.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert [ticket.tenant for ticket in decode.seen.tickets] == ["acme", "other"]
    assert decode.seen.tickets[0].salt != decode.seen.tickets[1].salt


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/completions", lambda user: {"user": user}),
        ("/v1/chat/completions", lambda user: {"user": user}),
        ("/v1/responses", lambda user: {"user": user}),
        ("/v1/messages", lambda user: {"metadata": {"user_id": user}}),
    ],
)
async def test_a_user_shares_prefixes_with_itself_alone(
    router: RouterUnderTest, decode: FakeDecode, path: str, named: Callable[[str | None], dict[str, Any]]
) -> None:
    salts: list[bytes] = []
    for user in ("u", "u", "v", None):
        response = await router.http.post(path, json={**BODIES[path], **named(user)})
        assert response.status_code == 200, response.text
        salts.append(decode.seen.tickets[-1].salt)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3


def test_the_priority_of_a_key_is_its_own_or_else_that_of_all(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    minted = [
        add_api_key(file, name=f"k{own}", tenant="a", scopes=frozenset({"generate"}), expires=None, priority_min=own)
        for own in (None, -10)
    ]
    door = authentication.Authenticator(keys_file=file, priority_min=0)
    asked = [door.principal({"x-api-key": key}).priority(-99) for key in minted]
    assert asked == [0, -10]


async def test_an_operators_pages_want_an_operators_key(locked: RouterUnderTest, keys: dict[str, str]) -> None:
    for path in ("/workers", "/health_generate"):
        assert (await locked.http.get(path)).status_code == 401
        assert (await locked.http.get(path, headers={"x-api-key": keys["acme"]})).status_code == 403
        assert (await locked.http.get(path, headers={"x-api-key": keys["ops"]})).status_code == 200
    assert (await locked.http.get("/v1/models")).status_code == 401
    assert (await locked.http.get("/v1/models", headers={"x-api-key": keys["acme"]})).status_code == 200
    for path in ("/livez", "/readyz", "/version", "/metrics"):
        assert (await locked.http.get(path)).status_code == 200
    response = await locked.http.post(
        "/v1/completions", json=BODIES["/v1/completions"], headers={"x-api-key": keys["ops"]}
    )
    assert response.status_code == 403


async def test_grpc_wants_the_same_keys(locked: RouterUnderTest, keys: dict[str, str]) -> None:
    async with AsyncClient(locked.grpc_address) as nobody:
        with pytest.raises(AuthenticationError, match="API key is needed"):
            await nobody.generate("a", max_tokens=1)
        with pytest.raises(AuthenticationError):
            await nobody.chat(CHAT)
    async with AsyncClient(locked.grpc_address, api_key=keys["acme"]) as acme:
        assert (await acme.generate("a", max_tokens=1)).completion_tokens == 1


async def test_keys_come_and_go_while_the_router_runs(
    locked: RouterUnderTest, keys: dict[str, str], keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "LOOK_AGAIN_S", 0.0)

    async def status(key: str) -> int:
        return (await locked.http.get("/v1/models", headers={"x-api-key": key})).status_code

    assert [await status(keys["acme"]), await status(keys["old"])] == [200, 401]
    remove_api_key(keys_file, "acme-ci")
    new = add_api_key(keys_file, name="new", tenant="acme", scopes=frozenset({"generate"}), expires=None)
    assert [await status(keys["acme"]), await status(new)] == [401, 200]
    await asyncio.to_thread(keys_file.write_text, "keys: 7")
    assert await status(new) == 200, "a file that is wrong changes nothing"
    await asyncio.to_thread(keys_file.unlink)
    assert await status(new) == 200


async def test_what_was_used_is_written_down_by_tenant_and_without_a_word(
    locked: RouterUnderTest, keys: dict[str, str], tmp_path: Path
) -> None:
    headers = {"x-api-key": keys["acme"], "x-request-id": "r-1"}
    body = {"prompt": "secret words", "max_tokens": 3}
    await locked.http.post("/v1/completions", json=body, headers=headers)
    await locked.http.post("/v1/completions", json={**body, "temperature": 9}, headers=headers)
    await locked.http.post("/v1/completions", json=body, headers={"x-api-key": "wrong"})
    await locked.http.post("/v1/messages", json=CHAT, headers=headers)
    file = tmp_path / "usage.jsonl"
    await until(lambda: file.read_text().count("\n") == 3)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(record["tenant"], record["key"], record["request"]) for record in records} == {("acme", "acme-ci", "r-1")}
    assert [(record["endpoint"], record["outcome"], record["completion_tokens"]) for record in records] == [
        ("completions", "ok", 3),
        ("completions", "invalid_field", 0),
        ("messages", "ok", 2),
    ]
    assert all(record["time_unix_ms"] > 1_700_000_000_000 for record in records)
    assert "secret" not in file.read_text()
    await asyncio.to_thread(file.rename, tmp_path / "usage.1")  # as a log rotation does
    await locked.http.post("/v1/completions", json=body, headers=headers)
    await until(lambda: file.exists() and file.read_text().count("\n") == 1)
