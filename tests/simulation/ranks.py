"""Simulated ranks: the real service over the real engine, stepped here, with a store's client of its own.

    calls ─▶ servicer ─▶ EngineRank: receive ─▶ (a step takes a while) ─▶ step ─▶ servicer ─▶ streams
                                store works ─▶ KvClient ─▶ FaultyTransport ─▶ values that all ranks share

Only the network is a stand-in (`tests/engine/hash_network.py`): its rows depend on exactly what is in the caches, so
that a wrong, stale or foreign block gives other tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

from tests.engine.engine_world import tiny_model
from tests.engine.eviction_fuzz import of_hashes
from tests.simulation.journal import Journal
from tests.simulation.network import Network, Node
from tests.simulation.virtual_time import SimulatedClock, VirtualLoop
from whalepod.cluster.rank_process import RankContext
from whalepod.cluster.rank_server import RankIdentity
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.cluster.static_ranks import RankServicer
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import Incarnation, RankId, mint_incarnation
from whalepod.engine.interface import Fidelity, FinishedEvent, HandoffEvent, StepEvent
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import LOAD_THREADS, EngineRank
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.faulty_transport import Fault, FaultSchedule, FaultyTransport, VirtualClock
from whalepod.kvstore.settings import StoreSettings
from whalepod.model.tensor_layout import ModelRole
from whalepod.services.decode.servicer import DecodeServicer
from whalepod.services.prefill.servicer import PrefillServicer

MODEL_NAME = "whale"
FIDELITIES = (Fidelity.FAST, Fidelity.EXACT)
DRAIN_POLL_S = 0.05


@dataclass(slots=True)
class StoreClock:
    """The time of one who waits for the store, while everybody else's stands still: ahead by what it has waited."""

    base: SimulatedClock
    waited_s: float = 0.0

    @property
    def now_s(self) -> float:
        return self.base.now_s + self.waited_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        self.waited_s = value - self.base.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return self.base.unix_ms()


@dataclass(slots=True)
class SharedStore:
    """What all clients reach, and how well."""

    schedule: FaultSchedule
    work_s: tuple[float, float]
    """What a piece of work takes it."""
    values: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    reachable: bool = True
    patience_s: float = 0.5
    """What one exchange takes when nobody answers."""
    _transports: list[FaultyTransport] = field(default_factory=list[FaultyTransport])

    def client(self, clock: SimulatedClock, incarnation: Incarnation, **kinds: object) -> tuple[KvClient, StoreClock]:
        """Of one process. Its faults are its own."""
        waiting = StoreClock(clock)
        schedule = replace(self.schedule, seed=self.schedule.seed ^ incarnation)
        transport = FaultyTransport(schedule, cast(VirtualClock, waiting), values=self.values)
        self._transports.append(transport)
        self._settle(transport)
        settings = StoreSettings(data_connections=1, missing_life_s=0.5)
        client = KvClient(
            settings,
            namespace=tiny_model().namespace,
            incarnation=incarnation,
            clock=waiting,
            transport=transport,
            **kinds,  # type: ignore[arg-type]  # a layout, if any
        )
        return client, waiting

    def set_reachable(self, *, reachable: bool) -> None:
        """Paused, dead or cut off: every exchange runs out of time."""
        self.reachable = reachable
        for transport in self._transports:
            self._settle(transport)

    def heal(self) -> None:
        """From now on nothing goes wrong with it."""
        self.schedule = replace(self.schedule, rates={})
        self.set_reachable(reachable=True)

    def _settle(self, transport: FaultyTransport) -> None:
        rates = self.schedule.rates if self.reachable else {Fault.DROP: 1.0}
        transport.schedule = replace(transport.schedule, rates=rates)
        transport.place.available = self.reachable


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank it is, whichever process serves it."""

    role: RankRole
    index: int
    options: RankOptions
    step_s: tuple[float, float] = (0.002, 0.01)

    @property
    def rank_id(self) -> RankId:
        return RankId(f"{self.role.pool}-{self.index}")

    @property
    def address(self) -> str:
        return f"{self.rank_id}:50051"


class SimulatedRank:
    """One process of a rank, from its start to its end."""

    def __init__(
        self,
        place: RankPlace,
        *,
        loop: VirtualLoop,
        network: Network,
        store: SharedStore,
        secret: ClusterSecret,
        clock: SimulatedClock,
        journal: Journal,
    ) -> None:
        model = tiny_model(ModelRole.ENCODER if place.role is RankRole.PREFILL_ENCODER else ModelRole.FULL)
        self.place = place
        self.node = Node(place.address)
        self.paused = False
        self._loop, self._network, self._clock, self._journal = loop, network, clock, journal
        self._draw = Random(network.draw.getrandbits(64))
        self._incarnation = mint_incarnation()
        self._draining = False
        self._busy: dict[object, None] = {}
        client, self._store_clock = store.client(clock, self._incarnation, layout=model.block_layout)
        self._store = store
        self.engine = EngineRank(
            model, place.options, store=client, on_step=self._on_step, instrument=of_hashes, clock=clock
        )
        prefills = place.role.is_prefill
        make: Callable[[RankContext], PrefillServicer | DecodeServicer] = (
            PrefillServicer if prefills else DecodeServicer
        )
        self.service = make(RankContext(self._identity(), self.engine, secret, model.namespace, FIDELITIES, clock))
        self.service.register(self.node)  # type: ignore[arg-type]  # all that it asks of a server
        RankServicer(self.describe, secret=secret).register(self.node)  # type: ignore[arg-type]
        self.engine.start(threads=False)
        network.add(self.node)
        loop.on_rest.append(self._look_for_work)

    def describe(self) -> RankInfo:
        limits = self.engine.limits
        return RankInfo(
            rank_id=self.place.rank_id,
            role=self.place.role,
            pool=self.place.role.pool,
            address=self.place.address,
            incarnation=self._incarnation,
            model=MODEL_NAME,
            namespace=limits.namespace,
            layout=limits.layout,
            context_tokens_max=limits.context_tokens_max,
            fidelities=FIDELITIES,
            time_unix_ms=self._clock.unix_ms(),
            load=self.engine.load(),
            draining=self._draining,
        )

    def kill(self, *, with_host: bool) -> None:
        """As `kill -9`, or as a power cut."""
        self._loop.on_rest.remove(self._look_for_work)
        self._network.kill(self.node, with_host=with_host)

    async def stop(self, drain_s: float) -> None:
        """As a process that is asked to (`cluster/rank_process.py`): drain, give back, go."""
        self._draining = True
        self.service.start_draining()
        until_s = self._loop.time() + drain_s
        while self.service.requests_live and self._loop.time() < until_s and self.node.alive:
            await asyncio.sleep(DRAIN_POLL_S)
        if self.node.alive:
            self.engine.give_back()
            await asyncio.sleep(DRAIN_POLL_S)
        if self.node.alive:
            self.kill(with_host=False)

    def _identity(self) -> RankIdentity:
        place = self.place
        return RankIdentity(
            rank_id=place.rank_id,
            index=place.index,
            role=place.role,
            pool=place.role.pool,
            host="",
            port=0,
            address=place.address,
            incarnation=self._incarnation,
            model_name=MODEL_NAME,
        )

    # What its threads would do.

    def _look_for_work(self) -> bool:
        """Begin what there is to do, unless its thread is at something."""
        if self.paused:
            return False
        begun = "step" not in self._busy and self.engine.has_work and self._begin_step()
        transfers = self.engine.transfers
        assert transfers is not None
        for index in range(LOAD_THREADS):
            if index not in self._busy and transfers.has_loads:
                self._begin(index, self._store_s(), self._do_store_work, index, transfers.work_on_load)
                begun = True
        if "writes" not in self._busy and transfers.has_writes:
            self._begin("writes", self._store_s(), self._do_store_work, "writes", transfers.work_on_write)
            begun = True
        return begun

    def _begin_step(self) -> bool:
        if not self.engine.receive():
            return False
        self._begin("step", self._draw.uniform(*self.place.step_s), self._end_step)
        return True

    def _end_step(self) -> None:
        preempted = self.engine.preempted
        try:
            self.engine.step()
            self.engine.check()
        except Exception:
            self.kill(with_host=False)  # as its process ends when its engine has failed
            raise
        self._journal.seen["preempted"] += self.engine.preempted - preempted

    def _begin(self, worker: object, seconds: float, work: Callable[..., None], *args: object) -> None:
        self._busy[worker] = None
        self._loop.call_later(seconds, self._work, worker, work, args)

    def _work(self, worker: object, work: Callable[..., None], args: Sequence[object]) -> None:
        if not self.node.alive:
            return
        if self.paused:  # it goes on afterwards
            self._loop.call_later(0.05, self._work, worker, work, args)
            return
        del self._busy[worker]
        work(*args)

    def _store_s(self) -> float:
        """How long the store will take for a piece of work."""
        return self._draw.uniform(*self._store.work_s) if self._store.reachable else self._store.patience_s

    def _do_store_work(self, worker: object, work: Callable[..., bool]) -> None:
        self._store_clock.waited_s = 0.0
        work(wait=False)
        if self._store_clock.waited_s:
            self._begin(worker, self._store_clock.waited_s, lambda: None)

    def _on_step(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            if isinstance(event, HandoffEvent) and not event.handoff.stored:
                self._journal.seen["not_stored"] += 1
            if isinstance(event, FinishedEvent) and event.error is not None:
                self._journal.seen[type(event.error).__name__] += 1
            self._journal.note(self.place.rank_id, _in_words(event))
        self._loop.call_soon(self._deliver, events)

    def _deliver(self, events: Sequence[StepEvent]) -> None:
        if self.node.alive:
            self.service.deliver(events, self.engine.load())


def _in_words(event: StepEvent) -> str:
    name = f"{event.request_id.hex()[:6]}/{event.attempt}"
    match event:
        case FinishedEvent():
            return f"{name} ends {event.reason.value} {event.error or ''}"
        case HandoffEvent():
            handoff = event.handoff
            return f"{name} leaves n={handoff.boundary_tokens} stored={handoff.stored} R={handoff.cached_tokens}"
        case _:
            return f"{name} says {[token.id for token in event.tokens]}"
