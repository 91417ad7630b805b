"""One run: the cluster of a plan, its clients and its troubles, and what must hold when all is over.

build ─▶ load and troubles ─▶ heal ─▶ every request has ended ─▶ one more for every router ─▶ nothing is left over
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from unittest import mock

from tests.simulation.answers import Answer, wrong_in
from tests.simulation.clients import ask_router
from tests.simulation.journal import LINES_KEPT, Journal
from tests.simulation.network import Network, Weather
from tests.simulation.plans import HEALED_S, Ask, Event, Plan, Trouble
from tests.simulation.ranks import RankPlace, SharedStore, SimulatedRank
from tests.simulation.routers import SimulatedRouter, cluster_secret, router_address
from tests.simulation.virtual_time import SimulatedClock, VirtualLoop, run_virtually
from whalepod.cluster.registration import RankRole
from whalepod.core import ids
from whalepod.engine.sampling_params import SamplingParams
from whalepod.kvstore.faulty_transport import FaultSchedule

QUIET_S = 20.0
"""After the last request has ended: longer than anything is remembered that still holds something."""
DRAIN_S = 1.0
"""What a rank that is asked to stop lets its requests finish in; one that is soon to be back, a fiftieth of it."""
HANGS_UP_S = 0.1
CANCELLED_S = 0.05
"""What a cancellation takes: its way, and the step that it meets."""
UNLINKED_S = 1.0
"""What it takes a rank to remove a hand-off that it has read."""
LONG_PROMPT_TOKENS = 200
ENDLESS_TOKENS = 150
"""Takes longer than both."""


@dataclass(slots=True)
class Outcome:
    """What became of a run. `wrong` is empty if it was well."""

    plan: Plan
    wrong: list[str]
    digest: str
    events: int
    lines: Sequence[str]
    seen: Counter[str]
    answers: Sequence[Answer] = field(default_factory=list[Answer])


def run_plan(plan: Plan, *, lines_kept: int | None = LINES_KEPT) -> Outcome:
    """Play it. Whatever breaks is in the outcome."""
    clock = SimulatedClock()
    journal = Journal(clock, lines_kept)
    answers: list[Answer] = []
    wrong: list[str] = []
    try:
        with _ids_of(plan.seed):
            run_virtually(clock, lambda loop: World(plan, loop, clock, journal, answers, wrong).run())
    except Exception as error:  # noqa: BLE001  a broken invariant, or a run that is stuck
        wrong.append(f"{type(error).__name__}: {error}")
    return Outcome(plan, wrong, journal.digest, journal.events, list(journal.lines), journal.seen, answers)


@contextmanager
def _ids_of(seed: int) -> Generator[None, None, None]:
    """Identifiers are drawn from the seed too."""
    draw = Random(seed)
    seeded = SimpleNamespace(
        token_bytes=draw.randbytes, randbits=draw.getrandbits, token_hex=lambda count: draw.randbytes(count).hex()
    )
    with mock.patch.object(ids, "secrets", seeded):
        yield


class World:
    """A cluster while it runs."""

    def __init__(
        self,
        plan: Plan,
        loop: VirtualLoop,
        clock: SimulatedClock,
        journal: Journal,
        answers: list[Answer],
        wrong: list[str],
    ) -> None:
        self._plan, self._loop, self._clock, self._journal = plan, loop, clock, journal
        self._answers, self._wrong = answers, wrong
        draw = Random(plan.seed ^ 0x5EED)
        self._network = Network(loop, draw, plan.weather, journal)
        self._store = SharedStore(FaultSchedule(seed=plan.seed, rates=plan.store_rates), plan.store_s)
        prefills = RankRole.PREFILL_ENCODER if plan.encoders else RankRole.PREFILL_FULL
        self._places = [
            RankPlace(role, index, options)
            for role, pool in ((prefills, plan.prefill), (RankRole.DECODE, plan.decode))
            for index, options in enumerate(pool)
        ]
        self._started: list[SimulatedRank] = []
        self._ranks = [self._start_rank(place) for place in self._places]
        self._routers = [self._new_router(index) for index in range(plan.routers)]
        self._troubles: list[asyncio.Task[None]] = []
        loop.set_exception_handler(self._on_loop_error)

    async def run(self) -> None:
        for router in self._routers:
            await router.start()
        self._troubles = [asyncio.create_task(self._suffer(event)) for event in self._plan.events]
        clients = [asyncio.create_task(self._serve_client(ask)) for ask in self._plan.asks]
        await asyncio.gather(*self._troubles, asyncio.sleep(HEALED_S - self._loop.time()))
        self._network.weather = Weather()
        self._store.heal()
        await asyncio.gather(*clients)
        self._check_answers()
        await asyncio.sleep(QUIET_S)
        await self._check_that_all_is_well_again()
        await self._check_that_a_cancellation_arrives()
        await asyncio.sleep(QUIET_S)
        self._check_nothing_is_held()
        await self._close()

    # Clients.

    async def _serve_client(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at_s - self._loop.time())
        await self._ask(ask)

    async def _ask(self, ask: Ask) -> Answer:
        answer = Answer(ask, began_s=self._loop.time())
        self._answers.append(answer)
        self._journal.note(ask.name, "asks", router_address(ask.router), len(ask.prompt), ask.fidelity.value)
        await ask_router(ask, answer, self._network)
        return answer

    def _check_answers(self) -> None:
        for answer in self._answers:
            self._judge(answer, calm=self._plan.calm, spared=self._plan.spared)

    def _judge(self, answer: Answer, *, calm: bool, spared: bool) -> None:
        found = wrong_in(answer, self._answers, calm=calm, spared=spared)
        self._wrong += [f"{answer.ask.name}: {what}" for what in found]

    async def _check_that_all_is_well_again(self) -> None:
        """Every router answers, at once and in one attempt, and nothing stays in the store for a request that has been
        answered."""
        before = self._handoffs()
        for index in range(self._plan.routers):
            ask = replace(
                self._plan.asks[index], name=f"last-{index}", router=index, hangs_up_after_s=None, timeout_s=20.0
            )
            answer = await self._ask(ask)
            self._judge(answer, calm=True, spared=True)
            if answer.end is not None and (answer.end.attempts or 1) > 1:
                self._wrong.append(f"{ask.name}: {answer.end.attempts} attempts though nothing was wrong")
        await asyncio.sleep(UNLINKED_S)
        if left := self._handoffs() - before:
            self._wrong.append(f"{UNLINKED_S} s after the last answer hand-offs are left: {left}")

    async def _check_that_a_cancellation_arrives(self) -> None:
        """Clients that hang up while their prompts are computed, and while they are answered: soon afterwards no rank
        works for anybody."""
        endless = self._endless("hangs-up")
        long_prompt = tuple(range(3, 3 + LONG_PROMPT_TOKENS))
        early = replace(
            endless,
            name="hangs-up-early",
            prompt=long_prompt,
            sampling=replace(endless.sampling, max_tokens=1),
            hangs_up_after_s=HANGS_UP_S / 10,
        )
        for ask in (early, endless):
            answer = await self._ask(ask)
            if answer.ended_s > answer.began_s + (ask.hangs_up_after_s or 0.0) + 1e-9:
                self._wrong.append(f"{ask.name}: it hung up late")
            await asyncio.sleep(CANCELLED_S)
            self._check_idle(f"{CANCELLED_S} s after {ask.name} has hung up")

    async def _check_that_dead_routers_leave_nothing(self) -> None:
        """All of them die in the middle of a request."""
        client = asyncio.create_task(self._ask(self._endless("orphan")))
        await asyncio.sleep(HANGS_UP_S / 2)
        for router in self._routers:
            await router.kill()
        await asyncio.sleep(CANCELLED_S)
        self._check_idle(f"{CANCELLED_S} s after the routers have died")
        await client

    def _endless(self, name: str) -> Ask:
        """Of a client that hangs up in the middle."""
        like = self._plan.asks[0]
        return replace(
            like,
            name=name,
            prompt=like.prompt[:40],
            sampling=SamplingParams(temperature=0.0, max_tokens=ENDLESS_TOKENS, ignore_eos=True),
            streams=True,
            choices=1,
            hangs_up_after_s=HANGS_UP_S,
            timeout_s=20.0,
            reads_every_s=0.0,
        )

    def _check_idle(self, when: str) -> None:
        loads = {rank.place.rank_id: rank.engine.load() for rank in self._ranks if rank.node.alive}
        working = {name: load.running + load.waiting for name, load in loads.items()}
        if any(working.values()):
            self._wrong.append(f"{when}, ranks are at requests: {working}")

    # Troubles.

    async def _suffer(self, event: Event) -> None:
        await asyncio.sleep(event.at_s - self._loop.time())
        place, router = self._places[event.rank], router_address(event.router)
        self._journal.seen[event.trouble.value] += 1
        self._journal.note("trouble", event.trouble.value, place.rank_id, router, event.lasts_s)
        match event.trouble:
            case Trouble.KILL | Trouble.POWER | Trouble.DRAIN:
                await self._replace_rank(event)
            case Trouble.PAUSE:
                await self._pause_rank(event)
            case Trouble.SILENCE:
                self._network.silence(router, place.address)
                await asyncio.sleep(event.lasts_s)
                self._network.heal(router, place.address)
            case Trouble.RESET:
                self._network.reset(router, place.address)
            case Trouble.STORE:
                self._store.set_reachable(reachable=False)
                await asyncio.sleep(event.lasts_s)
                self._store.set_reachable(reachable=True)
            case Trouble.ROUTER:
                await self._replace_router(event)
        self._journal.note("over", event.trouble.value)

    async def _replace_rank(self, event: Event) -> None:
        rank = self._ranks[event.rank]
        if not rank.node.alive:
            return
        if event.trouble is Trouble.DRAIN:
            await rank.stop(DRAIN_S if event.lasts_s > DRAIN_S else DRAIN_S / 50)
        else:
            rank.kill(with_host=event.trouble is Trouble.POWER)
        await asyncio.sleep(event.lasts_s)
        if self._ranks[event.rank] is rank:
            self._ranks[event.rank] = self._start_rank(self._places[event.rank])

    async def _pause_rank(self, event: Event) -> None:
        rank = self._ranks[event.rank]
        addresses = [router_address(index) for index in range(self._plan.routers)]
        rank.paused = True
        for address in addresses:
            self._network.silence(address, rank.node.address)
        await asyncio.sleep(event.lasts_s)
        rank.paused = False
        for address in addresses:
            self._network.heal(address, rank.node.address)

    async def _replace_router(self, event: Event) -> None:
        router = self._routers[event.router]
        if not router.started or not router.node.alive:
            return
        await router.kill()
        await asyncio.sleep(event.lasts_s)
        self._routers[event.router] = self._new_router(event.router)
        await self._routers[event.router].start()

    def _start_rank(self, place: RankPlace) -> SimulatedRank:
        rank = SimulatedRank(
            place,
            loop=self._loop,
            network=self._network,
            store=self._store,
            secret=cluster_secret(),
            clock=self._clock,
            journal=self._journal,
        )
        self._started.append(rank)
        return rank

    def _new_router(self, index: int) -> SimulatedRouter:
        addresses = [place.address for place in self._places]
        return SimulatedRouter(index, addresses, network=self._network, store=self._store, clock=self._clock)

    # The end.

    def _check_nothing_is_held(self) -> None:
        for rank in self._ranks:
            load, name = rank.engine.load(), rank.place.rank_id
            rank.engine.check()
            held = (load.running, load.waiting, load.blocks_total - load.blocks_free, rank.service.requests_live)
            if any(held):
                self._wrong.append(f"{name} still holds (running, waiting, blocks, requests) {held}")
        for router in self._routers:
            front, table = router.front, router.front.table
            if front.admission.running or front.admission.waiting:
                self._wrong.append(f"router-{router.index} still counts {front.admission.running} requests")
            if len(table.ranks) != len(self._ranks):
                self._wrong.append(f"router-{router.index} knows {sorted(table.ranks)}")
            for info in table.ranks.values():
                candidate = table.candidate(info)
                if candidate.requests_here or candidate.prefill_tokens_here:
                    self._wrong.append(f"router-{router.index} still counts work on {info.rank_id}")

        if self._plan.tidy and (left := self._handoffs()):
            self._wrong.append(f"hand-offs of requests that have ended are in the store: {left}")

    def _handoffs(self) -> set[bytes]:
        """Keys of those in the store (`kvstore/store_keys.py`)."""
        return {key for key in self._store.values if key.startswith(b"h:")}

    async def _close(self) -> None:
        await self._check_that_dead_routers_leave_nothing()
        for rank in self._ranks:
            rank.kill(with_host=False)
        for rank in self._started:
            rank.engine.stop()
        await asyncio.sleep(QUIET_S)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        timers = self._loop.timers_left()
        if left or timers:
            self._wrong.append(f"left over: tasks {left}, timers {timers}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self._wrong.append(f"{context.get('message')}: {context.get('exception')!r}")
