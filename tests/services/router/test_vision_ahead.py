"""What the router has vision ranks do before anybody needs it, and what it tells the others of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.model.vision.pictures import data_url, encoded, noise
from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, FakeVision
from tests.services.router.router_under_test import RouterUnderTest, check_nothing_is_left, running_router, until
from whalepod.cluster.vision_orders import by_affinity
from whalepod.engine.images import RequestImage
from whalepod.model.vision.preparation import content_hash
from whalepod.services.router import dispatch, vision_ahead
from whalepod.services.router.vision_ahead import images_to_compute


def span(start: int, tokens: int) -> RequestImage:
    return RequestImage(start, tokens, bytes(32), b"", 1, 1)


@pytest.mark.parametrize(
    ("stored", "needed"),
    [(0, [10, 40, 80]), (16, [10, 40, 80]), (48, [40, 80]), (64, [40, 80]), (96, [40, 80]), (1000, [40, 80])],
)
def test_a_hit_beyond_an_image_needs_none_of_it_but_for_the_replay(stored: int, needed: list[int]) -> None:
    """A hit is used up to the kept rows: 100 - 28 = 72; 16 rows before it are replayed."""
    images = [span(10, 20), span(40, 20), span(80, 10)]
    found = images_to_compute(images, stored_tokens=stored, prompt_tokens=100, kept_rows=28, window=16)
    assert [image.start for image in found] == needed


async def ask(router: RouterUnderTest, *seeds: int) -> int:
    parts = [{"type": "image_url", "image_url": {"url": data_url(encoded(noise(64, 64, seed=seed)))}} for seed in seeds]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "thinking": {"type": "disabled"}}
    return (await router.http.post("/v1/chat/completions", json=body)).status_code


async def test_each_image_is_asked_for_once_at_the_rank_that_all_ask_first(model_dir: Path) -> None:
    decode, prefill = FakeDecode(), FakePrefill()
    prefill.behaviour.step = asyncio.Event()
    vision = [FakeVision(f"vision-{index}") for index in range(2)]
    async with running_router(model_dir, [decode, prefill, *vision], remote_prefill_tokens_min=32) as router:
        answer = asyncio.create_task(ask(router, 1, 2, 3, 4, 5, 1))
        await until(lambda: sum(len(rank.orders) for rank in vision) == 5)
        prefill.behaviour.step.set()
        assert await answer == 200
        addresses = [rank.server.info().address for rank in vision]
        for rank, address in zip(vision, addresses, strict=True):
            for order in rank.orders:
                name = content_hash(order.data, order.width, order.height)
                assert by_affinity(addresses, name)[0] == address
                assert not order.wants_rows
        (request,) = decode.seen.starts
        assert set(request.vision_ranks) == set(addresses)
        assert [set(one.vision_ranks) for one in prefill.seen.starts] == [set(addresses)]


async def test_a_vision_rank_that_hangs_or_dies_holds_nobody_up(model_dir: Path) -> None:
    decode, vision = FakeDecode(), FakeVision()
    async with running_router(model_dir, [decode, vision]) as router:
        vision.hang = True
        assert await ask(router, 1) == 200
        await vision.server.kill()
        assert await ask(router, 2) == 200
        await until(lambda: not router.front.table.vision_ranks())
        assert await ask(router, 3) == 200
        assert decode.seen.starts[-1].vision_ranks == ()


async def test_some_images_are_asked_for_at_a_time_and_none_for_a_request_that_has_ended(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_ahead, "AHEAD_MAX", 2)
    decode, vision = FakeDecode(behaviour=Behaviour(step=asyncio.Event())), FakeVision()
    async with running_router(model_dir, [decode, vision]) as router:
        vision.hang = True
        answer = asyncio.create_task(ask(router, 1, 2, 3, 4, 5))
        await until(lambda: len(vision.orders) == 2)
        assert decode.behaviour.step is not None
        decode.behaviour.step.set()
        assert await answer == 200
        await until(lambda: vision.cancelled == 2)
        assert len(vision.orders) == 2


async def test_text_and_draining_ranks_are_left_alone(model_dir: Path) -> None:
    decode, vision = FakeDecode(), FakeVision()
    async with running_router(model_dir, [decode, vision]) as router:
        await router.complete(max_tokens=4)
        assert decode.seen.starts[-1].vision_ranks == ()
        vision.server.draining = True
        assert await ask(router, 1) == 200
        assert decode.seen.starts[-1].vision_ranks == ()
        assert vision.orders == []


async def test_an_attempt_that_fails_before_it_begins_is_counted_nowhere(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = FakeDecode(), FakePrefill()

    def broken(*_: object, **__: object) -> list[RequestImage]:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(dispatch, "images_to_compute", broken)
    async with running_router(model_dir, [decode, prefill], remote_prefill_tokens_min=32) as router:
        assert await ask(router, 1) == 500
        await check_nothing_is_left(router, decode, prefill)
