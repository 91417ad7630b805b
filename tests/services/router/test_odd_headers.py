"""Whatever a client writes into a header: nobody else's word is replaced by it, and nothing fails of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.router.fake_ranks import FakeDecode
from tests.services.router.router_under_test import RouterUnderTest, running_router
from tests.services.router.test_http_protocol import answer_to

BODY = b'{"prompt":"a","max_tokens":1}'


def request_of(path: bytes, body: bytes, *lines: bytes, version: bytes = b"1.1") -> bytes:
    head = [b"POST " + path + b" HTTP/" + version, b"content-type: application/json", b"connection: close", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


@pytest.mark.parametrize("length", [b"\xb2", b"9" * 5_000, b"-1", b"1e3"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/workers"])
async def test_a_length_that_is_none_is_passed_over(router: RouterUnderTest, path: bytes, length: bytes) -> None:
    body = BODY if path == b"/v1/completions" else b'{"rank":"decode-0"}'
    answer = await answer_to(router, request_of(path, body, b"host: x", b"content_length: " + length))
    assert answer.startswith("HTTP/1.1 200")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("origin", [b"http://[", b"http://]", b"http:", b"", b"\xff"])
async def test_an_origin_that_is_none_is_another_sites(router: RouterUnderTest, origin: bytes, version: bytes) -> None:
    host = [b"host: x"] if version == b"1.1" else []
    lines = [*host, b"origin: " + origin]
    answer = await answer_to(router, request_of(b"/workers", b'{"rank":"decode-0"}', *lines, version=version))
    assert answer.startswith("HTTP/1.1 403")


async def test_a_path_with_a_slash_too_many_leads_to_no_other_site(router: RouterUnderTest) -> None:
    answer = await router.http.get("/metrics/", headers={"host": "elsewhere.example"})
    assert (answer.status_code, "location" in answer.headers) == (404, False)


async def test_a_client_cannot_put_its_own_tenant_beside_the_proxys(model_dir: Path, decode: FakeDecode) -> None:
    async with running_router(model_dir, [decode], prefill_replicas=0, trust_tenant_header=True) as router:
        for lines in ([b"x-tenant-id: mine", b"x_tenant_id: yours"], [b"x_tenant_id: yours", b"X-Tenant-Id: mine"]):
            answer = await answer_to(router, request_of(b"/v1/completions", BODY, b"host: x", *lines))
            assert answer.startswith("HTTP/1.1 400")
            assert "x-tenant-id is given twice" in answer
        assert decode.seen.tickets == []
        same = [b"x-tenant-id: mine", b"x_tenant_id: mine"]
        assert (await answer_to(router, request_of(b"/v1/completions", BODY, b"host: x", *same))).startswith(
            "HTTP/1.1 200"
        )
        assert [ticket.tenant for ticket in decode.seen.tickets] == ["mine"]
