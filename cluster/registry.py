"""Who is in the cluster: ranks write signed registrations to Redis, routers keep a table of them.

    rank ── Registrar: SET with a life of seconds, repeated ──▶ Redis ──▶ RegistryWatcher: poll, verify ──▶ router

The table is not the truth about life and death, only the way to learn names. When Redis is gone or forgets a rank,
the watcher keeps what it knew and asks the rank itself (gRPC health). So a dead Redis costs no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError, ConfigError
from whalepod.core.ids import Incarnation, RankId

from .liveness import HealthProber, Liveness
from .registration import RankInfo, open_registration, sign_registration

log = logging.getLogger(__name__)

INDEX_KEY = b"{whalepod:ranks}"
"""A set of the names of all ranks. The braces put it and the registrations into one Redis Cluster slot."""

HEARTBEAT_S = 1.0
TTL_S = 5.0
REDIS_TIMEOUT_S = 1.0
SILENT_POLLS_MAX = 4
"""Polls in a row without an answer after which a rank that neither Redis nor a broken link speaks of is dropped."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What every rank of a cluster must agree on."""

    model: str
    namespace: bytes
    layout: str


def registration_key(rank_id: str) -> bytes:
    return INDEX_KEY + b":" + rank_id.encode()


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
        ttl_s: float = TTL_S,
    ) -> None:
        """`describe` returns the rank as it is now (load, draining); its `time_unix_ms` is filled in here."""
        self._redis = _connect(redis_url)
        self._secret = secret
        self._describe = describe
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._ttl_ms = int(ttl_s * 1000)
        self._loop_task: asyncio.Task[None] | None = None
        self._beat_lock = asyncio.Lock()

    async def start(self) -> None:
        """Join. Raises ConfigError, naming both layouts, if ranks of the same model already store state differently.

        Without Redis the check is skipped; routers repeat it.
        """
        me = self._describe()
        try:
            registrations = await _read_registrations(self._redis)
            await self._forget_names_without(registrations)
            peers = _verified(registrations, self._secret, self._clock).ranks
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("registry: Redis is not reachable (%s); registering when it is", error)
            peers = {}
        for peer in peers.values():
            if peer.rank_id == me.rank_id or peer.model != me.model:
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
                pipe = self._redis.pipeline(transaction=False)
                pipe.set(registration_key(me.rank_id), sign_registration(me, self._secret), px=self._ttl_ms, get=True)
                pipe.sadd(INDEX_KEY, me.rank_id)
                before = (await pipe.execute())[0]
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("registry: heartbeat failed: %s", error)
                return False
        self._warn_of_namesake(me, before)
        return True

    async def stop(self) -> None:
        """Leave: routers stop placing here within one poll."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
        rank_id = self._describe().rank_id
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.delete(registration_key(rank_id))
            await cast("Awaitable[int]", self._redis.srem(INDEX_KEY, rank_id))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    async def _forget_names_without(self, registrations: Mapping[str, bytes]) -> None:
        """Keep the index short: names of pods change with each roll-out. Who is alive adds its own again."""
        gone = [name for name in await _read_names(self._redis) if name.decode(errors="replace") not in registrations]
        if gone:
            await cast("Awaitable[int]", self._redis.srem(INDEX_KEY, *gone))

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.announce()

    def _warn_of_namesake(self, me: RankInfo, before: bytes | None) -> None:
        if before is None:
            return
        with contextlib.suppress(AuthenticationError):
            other = open_registration(before, self._secret, now_unix_ms=self._clock.unix_ms())
            if other.incarnation != me.incarnation and other.address != me.address:
                log.warning("registry: %s is the name of both %s and %s", me.rank_id, other.address, me.address)


class RegistryWatcher:
    """A router's table of ranks.

    watcher = RegistryWatcher(redis_url=…, secret=…, expected=Compatibility(…), on_change=…)
    await watcher.start()
    watcher.ranks            # usable now; a draining rank is listed with `draining` set
    watcher.report_lost(…)   # a link to a rank broke: out of the table until it answers or restarts
    """

    def __init__(
        self,
        *,
        redis_url: str,
        secret: ClusterSecret,
        expected: Compatibility | None = None,
        on_change: Callable[[Mapping[RankId, RankInfo]], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        poll_s: float = 0.5,
        probe: Callable[[str], Awaitable[Liveness]] | None = None,
    ) -> None:
        """`expected` None: the first registration decides. `on_change` runs on the event loop, after the table changed
        in more than load. `probe` asks an address whether it serves; None: gRPC health."""
        self._redis = _connect(redis_url)
        self._secret = secret
        self._expected = expected
        self._on_change = on_change
        self._clock = clock
        self._poll_s = poll_s
        self._prober = HealthProber() if probe is None else None
        self._probe = probe if probe is not None else self._require_prober().probe
        self._known: dict[RankId, RankInfo] = {}
        self._silent_polls: dict[RankId, int] = {}
        self._lost: dict[RankId, Incarnation] = {}
        self._ranks: Mapping[RankId, RankInfo] = MappingProxyType({})
        self._refused: dict[str, str] = {}
        self._redis_ok = False
        self._task: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        """Ranks that can be used now. Replaced, never changed in place."""
        return self._ranks

    @property
    def redis_ok(self) -> bool:
        """Whether the last poll reached Redis."""
        return self._redis_ok

    @property
    def refused(self) -> Mapping[str, str]:
        """Registrations that are not believed or do not fit: rank name to reason."""
        return self._refused

    async def start(self) -> None:
        """Returns after the first poll, whether or not Redis answered."""
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever(), name="registry-watcher")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._prober is not None:
            await self._prober.close()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        """The caller's link to this incarnation broke. The rank is unusable until it answers a health check."""
        if rank_id in self._ranks and self._ranks[rank_id].incarnation == incarnation:
            self._lost[rank_id] = incarnation
            self._publish({name: info for name, info in self._ranks.items() if name != rank_id})

    async def poll(self) -> None:
        """One round: read, verify, ask those in doubt, publish."""
        registered = await self._registered()
        self._known.update(registered)
        doubtful = [name for name in self._known if name not in registered or name in self._lost]
        answers = dict(zip(doubtful, await self._ask(doubtful), strict=True))
        usable: dict[RankId, RankInfo] = {}
        for name, info in list(self._known.items()):
            if name not in answers or self._believes(name, answers[name]):
                usable[name] = info
            elif self._redis_ok and name not in registered:
                self._forget(name)
        self._publish(usable)

    def _believes(self, name: RankId, answer: Liveness) -> bool:
        """Whether a rank in doubt stays usable. Slowness alone counts against it only after several polls."""
        if answer is Liveness.SERVING:
            self._silent_polls.pop(name, None)
            self._lost.pop(name, None)
            return True
        if answer is Liveness.SILENT and name not in self._lost:
            self._silent_polls[name] = self._silent_polls.get(name, 0) + 1
            return self._silent_polls[name] < SILENT_POLLS_MAX
        return False

    def _forget(self, name: RankId) -> None:
        self._known.pop(name, None)
        self._silent_polls.pop(name, None)
        self._lost.pop(name, None)

    async def _ask(self, names: list[RankId]) -> list[Liveness]:
        return list(await asyncio.gather(*(self._probe(self._known[name].address) for name in names)))

    async def _registered(self) -> dict[RankId, RankInfo]:
        """Verified, compatible registrations in Redis; empty if Redis does not answer."""
        try:
            raw = await _read_registrations(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            if self._redis_ok:
                log.warning("registry: Redis is gone (%s); keeping the last table of %d ranks", error, len(self._known))
            self._redis_ok = False
            return {}
        self._redis_ok = True
        found = _verified(raw, self._secret, self._clock)
        refused = dict(found.refused)
        registered: dict[RankId, RankInfo] = {}
        for name, info in sorted(found.ranks.items()):
            if self._expected is None:
                self._expected = Compatibility(info.model, info.namespace, info.layout)
            reason = info.incompatibility(
                model=self._expected.model, namespace=self._expected.namespace, layout=self._expected.layout
            )
            if reason is None:
                registered[name] = info
                if self._lost.get(name, info.incarnation) != info.incarnation:
                    del self._lost[name]
            else:
                refused[name] = reason
                self._forget(name)
        for name, reason in refused.items():
            if self._refused.get(name) != reason:
                log.error("registry: refused %s: %s", name, reason)
        self._refused = refused
        return registered

    def _publish(self, usable: dict[RankId, RankInfo]) -> None:
        changed = _identities(usable) != _identities(self._ranks)
        self._ranks = MappingProxyType(usable)
        if changed and self._on_change is not None:
            self._on_change(self._ranks)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.poll()
            except Exception:  # the table must outlive a bad poll; the next one may succeed
                log.exception("registry: a poll failed")

    def _require_prober(self) -> HealthProber:
        assert self._prober is not None
        return self._prober


@dataclass(frozen=True, slots=True)
class _Verified:
    ranks: dict[RankId, RankInfo]
    refused: dict[str, str]


def _verified(raw: Mapping[str, bytes], secret: ClusterSecret, clock: Clock) -> _Verified:
    result = _Verified(ranks={}, refused={})
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


async def _read_registrations(client: aioredis.Redis) -> dict[str, bytes]:
    """Rank name to serialised `SignedRegistration`, for the names whose registration has not expired."""
    names = await _read_names(client)
    values = await client.mget([INDEX_KEY + b":" + name for name in names]) if names else []
    pairs = zip(names, values, strict=True)
    return {name.decode(errors="replace"): value for name, value in pairs if value is not None}


async def _read_names(client: aioredis.Redis) -> list[bytes]:
    return sorted(await cast("Awaitable[set[bytes]]", client.smembers(INDEX_KEY)))


def _connect(redis_url: str) -> aioredis.Redis:
    return aioredis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # redis-py is partly untyped
        redis_url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, retry_on_timeout=False
    )


def _identities(ranks: Mapping[RankId, RankInfo]) -> dict[RankId, tuple[str, int, bool]]:
    return {name: (info.address, info.incarnation, info.draining) for name, info in ranks.items()}
