"""F2: health tells the truth about the pools, and liveness about the process alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.conftest import free_port
from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest, answer_to, running_router, until
from whalepod.core.ids import mint_incarnation
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.settings import StoreAddress, StoreSettings

READY = ["/readyz", "/ready", "/readiness", "/health"]
ALIVE = ["/livez", "/live", "/liveness"]


@pytest.mark.parametrize("path", READY)
@pytest.mark.parametrize("missing", ["decode", "prefill", "both"])
async def test_fault_f2_an_empty_pool_makes_the_router_not_ready_and_is_named(
    model_dir: Path, decode: FakeDecode, prefill: FakePrefill, path: str, missing: str
) -> None:
    ranks = {"decode": [prefill], "prefill": [decode], "both": []}[missing]
    async with running_router(model_dir, ranks) as router:
        response = await router.http.get(path)
        assert response.status_code == 503
        report = response.json()
        assert report["status"] != "ready"
        for pool in ("decode", "prefill"):
            empty = missing in (pool, "both")
            assert report["pools"][pool]["ranks"] == (0 if empty else 1)
            assert any(pool in reason for reason in report["reasons"]) == empty
        for alive in ALIVE:
            assert (await router.http.get(alive)).status_code == 200


@pytest.mark.parametrize("path", READY)
async def test_full_pools_make_it_ready(router: RouterUnderTest, path: str) -> None:
    response = await router.http.get(path)
    assert response.status_code == 200
    assert response.json()["reasons"] == []


async def test_a_cluster_without_a_prefill_pool_needs_none(model_dir: Path, decode: FakeDecode) -> None:
    async with running_router(model_dir, [decode], prefill_replicas=0) as router:
        assert (await router.http.get("/readyz")).status_code == 200


async def test_readiness_follows_the_ranks(router: RouterUnderTest, decode: FakeDecode) -> None:
    await router.complete(max_tokens=1)
    await decode.server.kill()
    await until(lambda: not router.readiness.report().ready)
    await decode.server.restart()
    await until(lambda: router.readiness.report().ready)


async def test_a_pool_that_only_drains_counts_as_empty(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.server.draining = True
    response = await router.http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["pools"]["decode"]["ranks"] == 0


async def test_a_router_that_shuts_down_is_not_ready(router: RouterUnderTest) -> None:
    router.readiness.draining = True
    assert (await router.http.get("/readyz")).status_code == 503
    assert (await router.http.get("/livez")).status_code == 200


async def test_health_generate_really_generates(router: RouterUnderTest, decode: FakeDecode) -> None:
    assert (await router.http.get("/health_generate")).status_code == 200
    assert len(decode.seen.starts) == 1
    await decode.server.kill()
    response = await router.http.get("/health_generate")
    assert response.status_code in (502, 503)


async def test_workers_are_listed(router: RouterUnderTest) -> None:
    workers = (await router.http.get("/workers")).json()["workers"]
    assert [worker["rank"] for worker in workers] == ["decode-0", "prefill-0"]


async def test_a_rank_that_is_taken_out_gets_no_new_work_until_it_is_put_back(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.behaviour.step = asyncio.Event()
    running = asyncio.create_task(router.complete(max_tokens=3))
    await until(lambda: decode.live)
    workers = (await router.http.delete("/workers/decode-0")).json()["workers"]
    assert [worker["draining"] for worker in workers] == [True, False]
    assert (await router.http.get("/readyz")).status_code == 503
    decode.behaviour.step.set()
    assert (await running)["usage"]["completion_tokens"] == 3, "what it has goes on"
    address = decode.server.info().address
    assert (await router.http.post("/workers", json={"rank": "decode-0"})).status_code == 200
    assert (await router.http.get("/readyz")).status_code == 200
    assert (await router.http.delete(f"/workers/{address}")).json()["workers"][0]["draining"]
    await router.http.post("/workers", json={"rank": address})
    await router.complete(max_tokens=1)


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"rank": "decode-0", "address": "a:1"}, 400), ({"address": "a"}, 400), ({"rank": "decode-9"}, 404)],
)
async def test_what_is_no_worker_is_refused(router: RouterUnderTest, body: dict[str, str], status: int) -> None:
    assert (await router.http.post("/workers", json=body)).status_code == status
    assert (await router.http.delete("/workers/decode-9")).status_code == 404
    registered = await router.http.post("/workers", json={"address": "127.0.0.1:1"})
    assert registered.json()["error"]["param"] == "address", "ranks of this router register"


async def test_the_served_model_is_listed_and_found_by_name(router: RouterUnderTest) -> None:
    (model,) = (await router.http.get("/v1/models")).json()["data"]
    assert model["id"] == "whale"
    assert model["max_model_len"] == 4096
    assert (await router.http.get("/v1/models/whale")).json() == model
    assert (await router.http.get("/v1/models/of/others")).status_code == 404


async def test_metrics_count_what_happened(router: RouterUnderTest) -> None:
    before = _sample(
        (await router.http.get("/metrics")).text, 'whalepod_requests_total{endpoint="completions",outcome="ok"}'
    )
    await router.complete(max_tokens=3)
    text = (await router.http.get("/metrics")).text
    assert _sample(text, 'whalepod_requests_total{endpoint="completions",outcome="ok"}') == before + 1
    assert _sample(text, "whalepod_router_requests_running") == 0
    assert _sample(text, 'whalepod_router_ranks{role="decode"}') == 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_seconds", "queue_seconds"):
        assert f"whalepod_{name}_bucket" in text
    for name in ("prompt", "cached", "completion"):
        assert f"whalepod_{name}_tokens_total" in text


async def test_the_api_describes_itself(router: RouterUnderTest) -> None:
    document = (await router.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    assert {"/v1/completions", "/v1/chat/completions", "/readyz"} <= set(document["paths"])
    schemas = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "allOf"
    ]
    names = {name for schema in schemas for name in schema["properties"]}
    assert {"prompt", "max_tokens", "top_k", "stream", "cache_salt"} <= names


async def test_text_becomes_tokens_and_back(router: RouterUnderTest) -> None:
    text = "Grüße 🐋 <think> is no token here"
    tokenized = (await router.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    back = (await router.http.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()
    assert back == {"prompt": text}
    with_bos = (await router.http.post("/tokenize", json={"prompt": text})).json()
    assert with_bos["tokens"] == [0, *tokenized["tokens"]]


async def test_a_conversation_is_tokenized_as_it_would_be_answered(router: RouterUnderTest, decode: FakeDecode) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    await router.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    tokenized = (await router.http.post("/tokenize", json={"messages": messages})).json()
    assert tokenized["tokens"] == list(decode.seen.starts[0].prompt_ids)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_odd_token_requests_are_refused_by_name(
    router: RouterUnderTest, path: str, body: dict[str, object], field: str
) -> None:
    response = await router.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def _sample(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


async def test_d11_a_router_that_has_just_started_is_ready_before_it_knows_anything_of_the_store(
    model_dir: Path,
) -> None:
    """There is no index to restore: prefixes are looked up, and learnt from replies."""
    decode = FakeDecode()
    async with running_router(model_dir, [decode], prefill_replicas=0) as router:
        response = await router.http.get("/readyz")
        assert response.status_code == 200


async def test_d10_a_router_that_cannot_look_prefixes_up_serves_and_says_that_it_chooses_by_load_alone(
    model_dir: Path, decode: FakeDecode, caplog: pytest.LogCaptureFixture
) -> None:
    def connect(namespace: bytes) -> KvClient:
        settings = StoreSettings(addresses=(StoreAddress(port=free_port()),))
        return KvClient(settings, namespace=namespace, incarnation=mint_incarnation())

    up = "whalepod_router_store_up"
    async with running_router(model_dir, [decode], prefill_replicas=0, connect_store=connect) as router:
        assert _sample((await router.http.get("/metrics")).text, up) == 1, "nothing has been asked yet"
        prompt = [400 + index % 90 for index in range(400)]
        for _ in range(20):
            assert len(await answer_to(router, prompt)) == 6
            if not router.front.lookup.healthy:
                break
        assert (await router.http.get("/readyz")).json()["store"] == "unreachable"
        assert (await router.http.get("/readyz")).status_code == 200
        assert _sample((await router.http.get("/metrics")).text, up) == 0
    assert caplog.text.count("ranks are chosen by load alone") == 1
