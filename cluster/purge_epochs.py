"""When each tenant's stored state was last purged: part of the tenant's salt, so that what was stored before is out of
reach at once, wherever it lies."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, cast

import redis.asyncio as aioredis

EPOCHS_KEY: Final = "{whalepod:ranks}/epochs"
"""A hash: tenant to epoch, Unix milliseconds."""


class PurgeEpochs:
    """What Redis has said of them so far. Never goes back, also if Redis forgets."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        """0: never purged, as far as is known."""
        return self._epochs.get(tenant, 0)

    async def read(self, client: aioredis.Redis) -> None:
        """Raises RedisError, OSError or TimeoutError if Redis does not answer."""
        found = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(EPOCHS_KEY))
        for tenant, epoch in found.items():
            name = tenant.decode(errors="replace")
            if epoch.isdigit():
                self._epochs[name] = max(int(epoch), self.of(name))


async def raise_epoch(client: aioredis.Redis, tenant: str, epoch: int) -> None:
    """Put everything that a tenant has stored so far out of reach. Raises as `read` does."""
    await cast("Awaitable[int]", client.hset(EPOCHS_KEY, tenant, str(epoch)))
