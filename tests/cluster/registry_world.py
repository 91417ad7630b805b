"""Registrations in a real Redis, a router's table of them, and what ranks answer when they are asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import redis.asyncio as aioredis

from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.liveness import Liveness
from whalepod.cluster.registrar import HEARTBEAT_S, Registrar
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.registration_store import INDEX_KEY, SILENCE_S, registration_key
from whalepod.cluster.registry import Compatibility, RegistryWatcher
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import Incarnation, RankId

SECRET = ClusterSecret(b"s" * 16)
DECODE = RankInfo(
    rank_id=RankId("decode-0"),
    role=RankRole.DECODE,
    pool="decode",
    address="127.0.0.1:8200",
    incarnation=Incarnation(1),
    model="whale",
    namespace=b"n" * 16,
    layout="B=64",
    context_tokens_max=4096,
)
PREFILL = replace(
    DECODE, rank_id=RankId("prefill-0"), role=RankRole.PREFILL_FULL, pool="prefill", address="127.0.0.1:8100"
)
EXPECTED = Compatibility(model="whale", namespace=b"n" * 16, layout="B=64")


class Probes:
    """What ranks answer when they are asked, by address. SERVING: they are who they were."""

    def __init__(self) -> None:
        self.answers: dict[str, RankInfo | Liveness] = {}

    async def __call__(self, rank: RankInfo) -> RankInfo | Liveness:
        answer = self.answers.get(rank.address, Liveness.UNREACHABLE)
        return rank if answer is Liveness.SERVING else answer


def url_of(server: EmbeddedRedis) -> str:
    return f"redis://127.0.0.1:{server.address.port}/0"


def registrar(server: EmbeddedRedis, info: RankInfo, *, heartbeat_s: float = HEARTBEAT_S) -> Registrar:
    return Registrar(redis_url=url_of(server), secret=SECRET, describe=lambda: info, heartbeat_s=heartbeat_s)


@asynccontextmanager
async def watching(
    server: EmbeddedRedis, probes: Probes, *, silence_s: float = SILENCE_S
) -> AsyncGenerator[RegistryWatcher]:
    watcher = RegistryWatcher(
        redis_url=url_of(server), secret=SECRET, expected=EXPECTED, probe=probes, silence_s=silence_s
    )
    try:
        yield watcher
    finally:
        await watcher.stop()


async def forge(server: EmbeddedRedis, name: str, value: bytes) -> None:
    async with aioredis.Redis.from_url(url_of(server)) as client:
        await client.set(registration_key(name), value)
        await client.sadd(INDEX_KEY, name)  # type: ignore[misc]
