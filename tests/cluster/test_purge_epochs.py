"""Purges are numbered, whoever's clock is ahead and whatever else lies in Redis."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import pytest
import redis.asyncio as aioredis

from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.purge_epochs import EPOCHS_KEY, PurgeEpochs, raise_epoch


async def test_a_purge_by_a_clock_that_is_behind_is_a_purge_all_the_same(redis_server: EmbeddedRedis) -> None:
    epochs = PurgeEpochs()
    async with aioredis.Redis(port=redis_server.address.port) as client:
        assert await raise_epoch(client, "acme", 2_000) == 2_000
        await epochs.read(client)
        assert await raise_epoch(client, "acme", 1_000) == 2_001
        await epochs.read(client)
    assert epochs.of("acme") == 2_001


@pytest.mark.parametrize("value", [b"9" * 5_000, b"%d" % 2**64, b"-1", b"soon", b"", b"\xb2"])
async def test_what_is_no_epoch_keeps_no_tenant_from_being_served_or_purged(
    redis_server: EmbeddedRedis, value: bytes
) -> None:
    epochs = PurgeEpochs()
    async with aioredis.Redis(port=redis_server.address.port) as client:
        await cast("Awaitable[int]", client.hset(EPOCHS_KEY, "acme", value.decode("latin-1")))
        await epochs.read(client)
        assert epochs.of("acme") == 0
        assert await raise_epoch(client, "acme", 7) == 7
