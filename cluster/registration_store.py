"""Registrations in Redis: where they lie, how they are read, and which of them are to be believed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import cast

import redis.asyncio as aioredis

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError
from whalepod.core.ids import RankId

from .registration import RankInfo, open_registration

log = logging.getLogger(__name__)

INDEX_KEY = b"{whalepod:ranks}"
"""A set of the names of all ranks. The braces put it and the registrations into one Redis Cluster slot."""

SILENCE_S = 5.0
"""A registration that has not changed for so long is doubted: its rank is asked."""
CLOCKS_APART_S = 5.0
"""How far the clocks of two machines may differ before a fresh registration, seen for the first time, is doubted."""
FORGET_S = 60.0
"""A doubted registration whose rank does not serve is removed after so long."""
REDIS_TIMEOUT_S = 1.0


def registration_key(rank_id: str) -> bytes:
    return INDEX_KEY + b":" + rank_id.encode()


@dataclass(frozen=True, slots=True)
class VerifiedRanks:
    ranks: dict[RankId, RankInfo]
    refused: dict[str, str]


def verified_ranks(raw: Mapping[str, bytes], secret: ClusterSecret, clock: Clock) -> VerifiedRanks:
    result = VerifiedRanks(ranks={}, refused={})
    for name, data in raw.items():
        try:
            info = open_registration(data, secret, now_unix_ms=clock.unix_ms())
        except AuthenticationError as error:
            result.refused[name] = str(error)
            continue
        if info.rank_id == name:
            result.ranks[info.rank_id] = info
        else:
            result.refused[name] = f"{name} holds the registration of {info.rank_id}"
    return result


def is_recent(info: RankInfo, clock: Clock) -> bool:
    """As far as two machines' clocks can tell."""
    return clock.unix_ms() - info.time_unix_ms < (SILENCE_S + CLOCKS_APART_S) * 1000


async def remove_registrations(client: aioredis.Redis, names: set[str] | set[RankId]) -> None:
    if names:
        await client.delete(*(registration_key(name) for name in names))
        await cast("Awaitable[int]", client.srem(INDEX_KEY, *names))


async def remove_strangers(client: aioredis.Redis, rank_id: RankId) -> None:
    """Whatever is no registration, or no set of names, where the rank's own belong: nothing could be written there."""
    for key, kind in ((registration_key(rank_id), b"string"), (INDEX_KEY, b"set")):
        if await client.type(key) not in (kind, b"none"):
            log.warning("registry: %s holds something else and is removed", key.decode())
            await client.delete(key)


async def read_registrations(client: aioredis.Redis) -> dict[str, bytes]:
    """Rank name to serialised `SignedRegistration`, for the names that have one."""
    names = await read_names(client)
    values = await client.mget([INDEX_KEY + b":" + name for name in names]) if names else []
    pairs = zip(names, values, strict=True)
    return {name.decode(errors="replace"): value for name, value in pairs if value is not None}


async def read_names(client: aioredis.Redis) -> list[bytes]:
    return sorted(await cast("Awaitable[set[bytes]]", client.smembers(INDEX_KEY)))


def connect_registry(redis_url: str) -> aioredis.Redis:
    return aioredis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # redis-py is partly untyped
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, retry_on_timeout=False
    )
