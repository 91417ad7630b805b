"""Vision ranks over the tiny golden model and a real Redis: one encode for all who ask, wherever they ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.model.vision.pictures import encoded, noise
from tests.services.rank_world import CHECKPOINT, SECRET, RunningRank, running_rank, world_config
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.grpc_options import channel_options
from whalepod.cluster.registration import RankRole
from whalepod.cluster.vision_orders import VisionCaller, by_affinity
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import (
    AuthenticationError,
    CapacityError,
    InvalidFieldError,
    ModelNotFoundError,
    ServingError,
    UnavailableError,
)
from whalepod.engine.images import RequestImage
from whalepod.engine.span_values import pack_rows
from whalepod.model.vision.encoder import VisionEncoder
from whalepod.model.vision.pixels import patches_of_bytes
from whalepod.model.vision.preparation import content_hash
from whalepod.rpc.vision.v1 import vision_pb2, vision_pb2_grpc
from whalepod.services.vision import servicer


def picture(seed: int = 0, *, data: bytes | None = None) -> RequestImage:
    data = encoded(noise(40, 28, seed=seed), "WEBP") if data is None else data
    return RequestImage(0, 3, content_hash(data, 40, 28), data, 40, 28)


class Ranks:
    def __init__(self, ranks: list[RunningRank], channels: list[grpc.aio.Channel]) -> None:
        self.ranks = ranks
        self._channels = channels

    def caller(self, **changes: Any) -> VisionCaller:
        info = self.ranks[0].info
        values: dict[str, Any] = {
            "model": info.model,
            "namespace": info.namespace,
            "secret": ClusterSecret(SECRET.encode()),
            "clock": SYSTEM_CLOCK,
            **changes,
        }
        return VisionCaller(**values)

    async def encode(
        self, image: RequestImage, *, rank: int = 0, wants_rows: bool = True, seconds: float = 30.0, **changes: Any
    ) -> vision_pb2.EncodeResponse:
        request = self.caller(**changes).request(image, seconds=seconds, wants_rows=wants_rows)
        return await self.call(request, rank=rank)

    async def call(self, request: vision_pb2.EncodeRequest, *, rank: int = 0) -> vision_pb2.EncodeResponse:
        stub: Any = vision_pb2_grpc.VisionServiceStub(self._channels[rank])
        try:
            return await stub.Encode(request, timeout=30)
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from None

    async def health(self, rank: int = 0) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self._channels[rank])
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


@asynccontextmanager
async def vision_ranks(redis_port: int, count: int = 1, **settings: object) -> AsyncGenerator[Ranks, None]:
    config = world_config(redis_port, vision={"replicas": count, **settings})
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(running_rank(config, "vision", index=i)) for i in range(count)]
        channels = [grpc.aio.insecure_channel(rank.info.address, options=channel_options()) for rank in ranks]
        yield Ranks(ranks, channels)
        await asyncio.gather(*(channel.close() for channel in channels))


def counted() -> dict[str, float]:
    """Images of this process, by where their rows were."""
    return {
        sample.labels["source"]: sample.value
        for metric in servicer.IMAGES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in counted().items() if value != before.get(name, 0)}


async def test_an_image_is_encoded_once_whoever_asks_and_however_often(redis_port: int) -> None:
    before = counted()
    async with vision_ranks(redis_port, 2) as ranks:
        encoder = VisionEncoder.load(CHECKPOINT)
        (wanted,) = encoder.encode([patches_of_bytes(picture().data, encoder.config)])
        answers = await asyncio.gather(*(ranks.encode(picture()) for _ in range(8)))
        assert {(answer.rows, answer.tokens) for answer in answers} == {(pack_rows(wanted), len(wanted))}
        assert since(before)["encoded"] == 1
        other = await ranks.encode(picture(), rank=1)
        assert (other.rows, other.encoded) == (pack_rows(wanted), False)
        quiet = await ranks.encode(picture(), rank=1, wants_rows=False)
        assert (quiet.rows, quiet.tokens) == (b"", len(wanted))
        seen = since(before)
        assert (seen["encoded"], seen["stored"]) == (1, 1)
        await ranks.encode(picture(1))
        assert since(before)["encoded"] == 2


async def test_nobody_meets_what_was_encoded_under_another_salt(redis_port: int) -> None:
    async with vision_ranks(redis_port, 2) as ranks:
        salted = [replace(picture(50), salt=salt) for salt in (b"one", b"other", b"one")]
        answers = [await ranks.encode(image) for image in salted]
        assert [answer.encoded for answer in answers] == [True, True, False]
        assert len({answer.rows for answer in answers}) == 1
        elsewhere = [await ranks.encode(image, rank=1) for image in (*salted[:2], replace(salted[0], salt=b"third"))]
        assert [answer.encoded for answer in elsewhere] == [False, False, True]


@pytest.mark.slow
async def test_rows_do_not_depend_on_what_is_encoded_beside_them(redis_port: int) -> None:
    async with vision_ranks(redis_port) as ranks:
        encoder = VisionEncoder.load(CHECKPOINT)
        images = [picture(seed) for seed in range(12)]
        answers = await asyncio.gather(*map(ranks.encode, images))
        for image, answer in zip(images, answers, strict=True):
            (alone,) = encoder.encode([patches_of_bytes(image.data, encoder.config)])
            assert answer.rows == pack_rows(alone)


@pytest.mark.slow
async def test_what_is_forgotten_here_is_found_in_the_store(redis_port: int) -> None:
    before = counted()
    async with vision_ranks(redis_port, cache_rows=0) as ranks:
        rows = [(await ranks.encode(picture())).rows for _ in range(3)]
        assert len(set(rows)) == 1
        assert since(before) == {"encoded": 1, "stored": 2}


async def test_nobody_but_a_process_of_the_cluster_is_served(redis_port: int) -> None:
    async with vision_ranks(redis_port) as ranks:
        image = picture()
        refused: list[tuple[type[ServingError], dict[str, Any]]] = [
            (AuthenticationError, {"secret": ClusterSecret(b"of somebody else's cluster")}),
            (AuthenticationError, {"seconds": -60.0}),
            (ModelNotFoundError, {"model": "another"}),
            (UnavailableError, {"namespace": bytes(16)}),
        ]
        for error, changes in refused:
            with pytest.raises(error):
                await ranks.encode(image, **changes)
        forged = ranks.caller().request(image, seconds=30, wants_rows=True)
        forged.order += b"\x10\x01"
        with pytest.raises(AuthenticationError):
            await ranks.call(forged)
        for data in (b"", b"no image", encoded(noise(40, 28), "WEBP")[:60]):
            with pytest.raises(InvalidFieldError, match="decoded"):
                await ranks.encode(picture(data=data))
        assert ranks.ranks[0].info.role is RankRole.VISION
        assert (await ranks.encode(image)).tokens > 0, "and it goes on"


async def test_more_calls_than_may_wait_are_refused(redis_port: int) -> None:
    async with vision_ranks(redis_port, queue_images=2) as ranks:
        answers = await asyncio.gather(*(ranks.encode(picture(60 + n)) for n in range(12)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, CapacityError)]
        assert 0 < len(refused) <= 10
        assert (await ranks.encode(picture(60))).tokens > 0
        assert all(isinstance(answer, CapacityError | vision_pb2.EncodeResponse) for answer in answers)


async def test_a_draining_rank_refuses_newcomers_and_says_so(redis_port: int) -> None:
    async with vision_ranks(redis_port) as ranks:
        assert await ranks.health() == health_pb2.HealthCheckResponse.SERVING
        ranks.ranks[0].stop.set()

        async def until_refused() -> None:
            while True:
                await ranks.encode(picture())
                await asyncio.sleep(0.01)

        with pytest.raises(UnavailableError):
            await until_refused()


def test_every_image_has_a_rank_that_all_ask_first_and_few_move_when_one_leaves() -> None:
    addresses = [f"10.0.0.{index}:8300" for index in range(4)]
    hashes = [bytes([index]) * 32 for index in range(200)]
    first = {name: by_affinity(addresses, name)[0] for name in hashes}
    assert all(by_affinity(addresses[::-1], name)[0] == first[name] for name in hashes)
    assert set(first.values()) == set(addresses)
    left = {name: by_affinity(addresses[1:], name)[0] for name in hashes}
    assert all(left[name] == first[name] for name in hashes if first[name] != addresses[0])
