"""A rank's side of the registry: join, say again every second that it is there, leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import cast

from redis.exceptions import RedisError, ResponseError

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError, ConfigError
from whalepod.core.ids import RankId
from whalepod.core.tasks import cancel_and_wait

from .registration import RankInfo, open_registration, sign_registration
from .registration_store import (
    FORGET_S,
    INDEX_KEY,
    connect_registry,
    is_recent,
    read_names,
    read_registrations,
    registration_key,
    remove_registrations,
    remove_strangers,
    verified_ranks,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class Registrar:
    """Keeps one rank registered. No Redis failure is raised after `start`: the rank serves whoever knows it."""

    def __init__(
        self,
        *,
        redis_url: str,
        secret: ClusterSecret,
        describe: Callable[[], RankInfo],
        clock: Clock = SYSTEM_CLOCK,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`describe` returns the rank as it is now (load, draining); its `time_unix_ms` is filled in here."""
        self._redis = connect_registry(redis_url)
        self._secret = secret
        self._describe = describe
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._loop_task: asyncio.Task[None] | None = None
        self._beat_lock = asyncio.Lock()

    async def start(self) -> None:
        """Join. Raises ConfigError, naming both layouts, if ranks of the same model already store state differently.

        Without Redis the check is skipped; routers repeat it.
        """
        me = self._describe()
        try:
            registrations = await read_registrations(self._redis)
            peers = verified_ranks(registrations, self._secret, self._clock).ranks
            await self._forget_all_but(registrations, peers)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("registry: Redis is not reachable (%s); registering when it is", error)
            peers = {}
        for peer in peers.values():
            if peer.rank_id == me.rank_id or peer.model != me.model or not is_recent(peer, self._clock):
                continue
            reason = me.incompatibility(model=peer.model, namespace=peer.namespace, layout=peer.layout)
            if reason is not None:
                raise ConfigError(f"{reason}; {peer.rank_id} is already part of it")
        await self.announce()
        self._loop_task = asyncio.create_task(self._beat_forever(), name="registrar")

    async def announce(self) -> bool:
        """Write the registration now. False: Redis did not take it."""
        async with self._beat_lock:
            me = replace(self._describe(), time_unix_ms=self._clock.unix_ms())
            try:
                try:
                    before = await self._write(me)
                except ResponseError:
                    await remove_strangers(self._redis, me.rank_id)
                    before = await self._write(me)
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("registry: heartbeat failed: %s", error)
                return False
        self._warn_of_namesake(me, before)
        return True

    async def _write(self, me: RankInfo) -> bytes | None:
        """Returns what was there before."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(registration_key(me.rank_id), sign_registration(me, self._secret), get=True)
        pipe.sadd(INDEX_KEY, me.rank_id)
        return (await pipe.execute())[0]

    async def stop(self) -> None:
        """Leave: routers stop placing here within one poll."""
        if self._loop_task is not None:
            await cancel_and_wait(self._loop_task)
        me = self._describe()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            if self._is_mine(await self._redis.get(registration_key(me.rank_id)), me):
                await self._redis.delete(registration_key(me.rank_id))
                await cast("Awaitable[int]", self._redis.srem(INDEX_KEY, me.rank_id))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    async def _forget_all_but(self, registrations: Mapping[str, bytes], ranks: Mapping[RankId, RankInfo]) -> None:
        """Keep the index short: names of pods change with each roll-out. Who is alive adds its own again."""
        oldest_ms = self._clock.unix_ms() - FORGET_S * 1000
        names = {name.decode(errors="replace") for name in await read_names(self._redis)}
        gone = names - set(registrations) | {name for name, rank in ranks.items() if rank.time_unix_ms < oldest_ms}
        await remove_registrations(self._redis, gone)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.announce()

    def _is_mine(self, registration: bytes | None, me: RankInfo) -> bool:
        """Not if the name has passed to a later incarnation: that one stays."""
        return registration is not None and self._holder(registration, me).incarnation == me.incarnation

    def _warn_of_namesake(self, me: RankInfo, before: bytes | None) -> None:
        other = me if before is None else self._holder(before, me)
        if other.incarnation != me.incarnation and other.address != me.address:
            log.warning("registry: %s is the name of both %s and %s", me.rank_id, other.address, me.address)

    def _holder(self, registration: bytes, me: RankInfo) -> RankInfo:
        """Who wrote it; a forged one counts as ours to replace."""
        try:
            return open_registration(registration, self._secret, now_unix_ms=self._clock.unix_ms())
        except AuthenticationError:
            return me
