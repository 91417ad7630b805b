"""Images in every API: what ranks are told of them, and what clients are told when they are no good."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from tests.model.vision.pictures import data_url, encoded, noise, plain
from tests.services.router.fake_ranks import FakeDecode, FakePrefill
from tests.services.router.router_under_test import RouterUnderTest
from whalepod.engine.images import RequestImage, block_extras
from whalepod.engine.interface import EngineRequest
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc

RED, BLUE = encoded(plain(100, 80)), encoded(plain(100, 80, "blue"))
TEXT = "What colour is this, and what shape?"
NOT_THINKING = {"thinking": {"type": "disabled"}}


def chat_body(url: str, **part: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url, **part}}]
    return {"messages": [{"role": "user", "content": content}], **NOT_THINKING}


def responses_body(url: str, **part: Any) -> dict[str, Any]:
    content = [{"type": "input_text", "text": TEXT}, {"type": "input_image", "image_url": url, **part}]
    return {"input": [{"role": "user", "content": content}], "reasoning": {"effort": "none"}}


def messages_body(url: str, **_: Any) -> dict[str, Any]:
    if url.startswith("data:"):
        media_type, data = url.removeprefix("data:").split(";base64,")
        source = {"type": "base64", "media_type": media_type, "data": data}
    else:
        source = {"type": "url", "url": url}
    content = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    return {"messages": [{"role": "user", "content": content}], **NOT_THINKING}


APIS = {
    "/v1/chat/completions": (chat_body, "max_tokens", "messages"),
    "/v1/responses": (responses_body, "max_output_tokens", "input"),
    "/v1/messages": (messages_body, "max_tokens", "messages"),
}


async def ask(router: RouterUnderTest, path: str, url: str, **part: Any) -> tuple[int, dict[str, Any]]:
    make, limit, _ = APIS[path]
    response = await router.http.post(path, json={**make(url, **part), limit: 4})
    return response.status_code, response.json()


async def told(router: RouterUnderTest, decode: FakeDecode, path: str, data: bytes, **part: Any) -> EngineRequest:
    status, answer = await ask(router, path, data_url(data), **part)
    assert status == 200, answer
    return decode.seen.starts[-1]


@pytest.mark.parametrize("path", APIS)
async def test_every_api_brings_the_image_to_both_ranks(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, path: str
) -> None:
    request = await told(router, decode, path, RED)
    (image,) = request.images
    config_id = request.prompt_ids[image.start]
    assert set(request.prompt_ids[image.start : image.end]) == {config_id}
    assert config_id not in (*request.prompt_ids[: image.start], *request.prompt_ids[image.end :])
    assert image.data[:4] == b"RIFF"
    assert [one.images for one in prefill.seen.starts] == [request.images]


async def test_all_apis_mean_the_same_image(router: RouterUnderTest, decode: FakeDecode) -> None:
    requests = [await told(router, decode, path, RED) for path in APIS]
    assert len({request.images[0].content_hash for request in requests}) == 1


async def test_a_stream_of_grpc_brings_it_too(router: RouterUnderTest, decode: FakeDecode) -> None:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        body = json.dumps({**chat_body(data_url(RED)), "max_tokens": 4})
        answer = json.loads((await stub.Chat(router_pb2.ChatRequest(body_json=body))).body_json)
    (image,) = decode.seen.starts[-1].images
    assert answer["usage"]["prompt_tokens"] > image.tokens


async def test_blocks_are_named_after_the_image(router: RouterUnderTest, decode: FakeDecode) -> None:
    """The same text and ids with another image share no block that it touches."""
    red, blue, again = [await told(router, decode, "/v1/chat/completions", data) for data in (RED, BLUE, RED)]
    assert red.prompt_ids == blue.prompt_ids
    first = red.images[0].start // 16
    assert red.block_hashes[:first] == blue.block_hashes[:first]
    assert not set(red.block_hashes[first:]) & set(blue.block_hashes[first:])
    assert red.block_hashes == again.block_hashes
    assert set(block_extras(red.images, block_tokens=16)) == set(range(first, (red.images[0].end - 1) // 16 + 1))


async def test_detail_reaches_the_released_layer(router: RouterUnderTest, decode: FakeDecode) -> None:
    large = encoded(plain(1024, 768))
    sizes: list[RequestImage] = []
    for detail in ("low", "high"):
        sizes += (await told(router, decode, "/v1/chat/completions", large, detail=detail)).images
    assert sizes[0].width < sizes[1].width


async def test_tokens_of_images_are_counted(router: RouterUnderTest, decode: FakeDecode) -> None:
    request = await told(router, decode, "/v1/messages", RED)
    counted = await router.http.post("/v1/messages/count_tokens", json=messages_body(data_url(RED)))
    assert counted.json()["input_tokens"] == len(request.prompt_ids)
    tokenized = await router.http.post("/tokenize", json=chat_body(data_url(RED)))
    assert tokenized.json()["count"] == len(request.prompt_ids)


async def test_a_wrong_media_type_is_no_matter(router: RouterUnderTest, decode: FakeDecode) -> None:
    status, _ = await ask(router, "/v1/chat/completions", data_url(RED, "image/jpeg"))
    assert status == 200
    assert len(decode.seen.starts[-1].images) == 1


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("url", "code"),
    [
        (data_url(b"hello"), "unsupported_media_type"),
        (data_url(encoded(plain(9, 9), "BMP")), "unsupported_media_type"),
        (data_url(encoded(noise(200, 200))[:3000]), "empty_image"),
        ("data:image/png;base64,@@@", "invalid_value"),
        ("https://127.0.0.1:1/x.png", "destination_rejected"),
        ("https://169.254.169.254/latest", "destination_rejected"),
        ("http://example.com/x.png", "invalid_url"),
    ],
)
async def test_an_image_that_is_no_good_is_a_named_400_and_touches_no_rank(
    router: RouterUnderTest, decode: FakeDecode, path: str, url: str, code: str
) -> None:
    status, answer = await ask(router, path, url)
    assert status == 400, answer
    error = answer["error"]
    if path != "/v1/messages":  # whose errors have neither
        assert (error["param"], error["code"]) == (APIS[path][2], code)
    assert "[" in error["message"] or "url" in error["message"].lower(), "the image's place is told"
    assert decode.seen.starts == []


async def test_text_has_no_images(router: RouterUnderTest, decode: FakeDecode) -> None:
    await router.complete(max_tokens=4)
    assert tuple(decode.seen.starts[-1].images) == ()
