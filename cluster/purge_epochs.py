"""When each tenant's stored state was last purged: part of the tenant's salt, so that what was stored before is out of
reach at once, wherever it lies."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Final, cast

import redis.asyncio as aioredis

EPOCHS_KEY: Final = "{whalepod:ranks}/epochs"
"""A hash: tenant to epoch, Unix milliseconds."""
EPOCH_MAX: Final = 2**53
"""Milliseconds: 285,000 years. What is larger somebody else has written."""
REMOVED_KEY: Final = "{whalepod:ranks}/removed"
"""A hash: tenant to the epoch whose purge has been carried out in the store, too."""
_DIGITS_MAX: Final = len(str(EPOCH_MAX))


class PurgeEpochs:
    """What Redis has said of them so far. Never goes back, also if Redis forgets."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        """0: never purged, as far as is known."""
        return self._epochs.get(tenant, 0)

    @property
    def known(self) -> Mapping[str, int]:
        return self._epochs

    async def read(self, client: aioredis.Redis, key: str = EPOCHS_KEY) -> None:
        """Raises RedisError, OSError or TimeoutError if Redis does not answer."""
        found = await cast("Awaitable[dict[bytes, bytes]]", client.hgetall(key))
        for tenant, epoch in found.items():
            name = tenant.decode(errors="replace")
            self._epochs[name] = max(_epoch_of(epoch), self.of(name))


async def unfinished_purges(client: aioredis.Redis) -> dict[str, int]:
    """Tenants whose stored state is out of reach, and still there: tenant to epoch. Raises as `read` does."""
    epochs, removed = PurgeEpochs(), PurgeEpochs()
    await epochs.read(client)
    await removed.read(client, REMOVED_KEY)
    return {tenant: epoch for tenant, epoch in epochs.known.items() if removed.of(tenant) < epoch}


async def note_removed(client: aioredis.Redis, tenant: str, epoch: int) -> None:
    """What the purge of that epoch was about has been removed. Raises as `read` does."""
    await cast("Awaitable[int]", client.hset(REMOVED_KEY, tenant, str(epoch)))


async def raise_epoch(client: aioredis.Redis, tenant: str, now_unix_ms: int) -> int:
    """Put everything that a tenant has stored so far out of reach, and return the new epoch: later than the last one,
    also if that was written by a clock that is ahead. Raises as `read` does."""
    last = await cast("Awaitable[bytes | None]", client.hget(EPOCHS_KEY, tenant))
    epoch = max(now_unix_ms, _epoch_of(last or b"") + 1)
    await cast("Awaitable[int]", client.hset(EPOCHS_KEY, tenant, str(epoch)))
    return epoch


def _epoch_of(value: bytes) -> int:
    """0: it is none."""
    known = value.isdigit() and len(value) <= _DIGITS_MAX
    return int(value) if known and int(value) <= EPOCH_MAX else 0
