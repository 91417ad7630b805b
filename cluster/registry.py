"""Who is in the cluster: ranks write signed registrations to Redis, routers keep a table of them.

    rank ── Registrar: SET, again every second ──▶ Redis ──▶ RegistryWatcher: poll, verify ──▶ router

A registration has no life in Redis: where blocks share the server, what expires soonest is evicted first. It is old
when it has not changed for some seconds, and old ones are removed by whoever meets them.

The table is not the truth about life and death, only the way to learn names. When Redis is gone or forgets a rank,
the watcher keeps what it knew and asks the rank itself. So a dead Redis costs no request. What was signed before what a
name is known to have said is no news of it, whoever has written it once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from redis.exceptions import RedisError

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import Incarnation, RankId
from whalepod.core.tasks import cancel_and_wait

from .liveness import Liveness
from .peer_tls import PeerTls
from .purge_epochs import PurgeEpochs, raise_epoch
from .rank_prober import RankProber
from .registration import RankInfo
from .registration_store import (
    FORGET_S,
    SILENCE_S,
    connect_registry,
    is_recent,
    read_registrations,
    remove_registrations,
    verified_ranks,
)

log = logging.getLogger(__name__)

SILENT_POLLS_MAX = 4
"""Polls in a row without an answer after which a rank that neither Redis nor a broken link speaks of is dropped."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What every rank of a cluster must agree on."""

    model: str
    namespace: bytes
    layout: str


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last registration under a name."""

    data: bytes
    signed_unix_ms: int
    at_s: float
    """When it was seen first."""


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
        tls: PeerTls | None = None,
        clock: Clock = SYSTEM_CLOCK,
        poll_s: float = 0.5,
        silence_s: float = SILENCE_S,
        probe: Callable[[RankInfo], Awaitable[RankInfo | Liveness]] | None = None,
    ) -> None:
        """`expected` None: the first registration decides. `on_change` runs on the event loop, after the table changed
        in more than load. `probe` asks a rank at its address; None: as `RankProber` does."""
        self._redis = connect_registry(redis_url)
        self._secret = secret
        self._expected = expected
        self._on_change = on_change
        self._clock = clock
        self._poll_s = poll_s
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}
        self._speaks_tls = tls is not None
        self._prober = RankProber(secret=secret, tls=tls, clock=clock)
        self._probe = self._prober.probe if probe is None else probe
        self._known: dict[RankId, RankInfo] = {}
        self._silent_polls: dict[RankId, int] = {}
        self._lost: dict[RankId, Incarnation] = {}
        self._ranks: Mapping[RankId, RankInfo] = MappingProxyType({})
        self._refused: dict[str, str] = {}
        self._epochs = PurgeEpochs()
        self._redis_ok = False
        self._polled = False
        self._task: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        """Ranks that can be used now. Replaced, never changed in place."""
        return self._ranks

    def purge_epoch(self, tenant: str) -> int:
        """Of the tenant's last purge, as of the last poll; 0: never. Never goes back, also if Redis forgets."""
        return self._epochs.of(tenant)

    async def purge(self, tenant: str) -> None:
        """Put what the tenant has stored so far out of reach. Raises UnavailableError if Redis does not answer."""
        try:
            await raise_epoch(self._redis, tenant, self._clock.unix_ms())
            await self._epochs.read(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            raise UnavailableError(f"the purge cannot be written down: {error or type(error).__name__}") from None

    @property
    def settled(self) -> bool:
        """Whether everything that was registered has been looked at, or Redis did not answer."""
        return self._polled

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
            await cancel_and_wait(self._task)
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
            if name not in answers:
                usable[name] = info
            elif (said := self._believed(info, answers[name])) is not None:
                usable[name] = self._known[name] = said
            elif self._redis_ok and name not in registered:
                self._forget(name)
        self._publish(usable)
        self._polled = True
        await self._remove_old(usable)

    def _believed(self, known: RankInfo, answer: RankInfo | Liveness) -> RankInfo | None:
        """What a rank in doubt is taken for; None: it is not usable. Slowness alone counts against it only after
        several polls, and for one that was not usable before it counts at once."""
        name = known.rank_id
        if isinstance(answer, RankInfo) and self._misfit(answer) is None:
            self._silent_polls.pop(name, None)
            self._lost.pop(name, None)
            return replace(answer, address=known.address)
        if answer is Liveness.SILENT and name in self._ranks:
            self._silent_polls[name] = self._silent_polls.get(name, 0) + 1
            return known if self._silent_polls[name] < SILENT_POLLS_MAX else None
        return None

    def _misfit(self, info: RankInfo) -> str | None:
        """Why a rank cannot be used here, whatever its state."""
        if self._expected is None:
            self._expected = Compatibility(info.model, info.namespace, info.layout)
        return info.unreachable_for(speaks_tls=self._speaks_tls) or info.incompatibility(
            model=self._expected.model, namespace=self._expected.namespace, layout=self._expected.layout
        )

    def _forget(self, name: RankId) -> None:
        self._known.pop(name, None)
        self._silent_polls.pop(name, None)
        self._lost.pop(name, None)

    async def _remove_old(self, usable: Mapping[RankId, RankInfo]) -> None:
        """Registrations of ranks that have long been silent, and do not serve when they are asked."""
        oldest_s = self._clock.monotonic_s() - FORGET_S
        old = {name for name, heard in self._heard.items() if heard.at_s < oldest_s and name not in usable}
        if old and self._redis_ok:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await remove_registrations(self._redis, old)

    def _is_fresh(self, name: str, data: bytes, info: RankInfo) -> bool:
        """Whether a registration speaks of now: it has changed lately, or is new here and says so itself."""
        now_s = self._clock.monotonic_s()
        heard = self._heard.get(name)
        if heard is None:
            at_s = now_s if is_recent(info, self._clock) else now_s - self._silence_s
            heard = self._heard[name] = _Heard(data, info.time_unix_ms, at_s)
        elif info.time_unix_ms < heard.signed_unix_ms:
            return False  # or the clock of its machine is behind that of its predecessor's: the rank will say
        elif data != heard.data:
            heard = self._heard[name] = _Heard(data, info.time_unix_ms, now_s)
        return now_s - heard.at_s < self._silence_s

    async def _ask(self, names: list[RankId]) -> list[RankInfo | Liveness]:
        return list(await asyncio.gather(*(self._probe(self._known[name]) for name in names)))

    async def _registered(self) -> dict[RankId, RankInfo]:
        """Verified, compatible, fresh registrations in Redis; empty if Redis does not answer. Others that are
        verified and compatible are known from then on, and doubted."""
        try:
            raw = await read_registrations(self._redis)
            await self._epochs.read(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            if self._redis_ok:
                log.warning("registry: Redis is gone (%s); keeping the last table of %d ranks", error, len(self._known))
            self._redis_ok = False
            return {}
        self._redis_ok = True
        self._heard = {name: heard for name, heard in self._heard.items() if name in raw}
        found = verified_ranks(raw, self._secret, self._clock)
        refused = dict(found.refused)
        registered: dict[RankId, RankInfo] = {}
        for name, info in sorted(found.ranks.items()):
            reason = self._misfit(info)
            if reason is None and not self._is_fresh(name, raw[name], info):
                self._known.setdefault(name, info)
            elif reason is None:
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


def _identities(ranks: Mapping[RankId, RankInfo]) -> dict[RankId, tuple[str, int, bool]]:
    return {name: (info.address, info.incarnation, info.draining) for name, info in ranks.items()}
