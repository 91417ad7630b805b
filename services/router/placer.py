"""From a job to the ranks of one attempt: gathers what placement is a function of, and counts the request there.

job ──▶ SharedPrefixes.settled ──▶ candidates, costs, hot rank ──▶ plan_placement ──▶ claims ──▶ Legs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random

from whalepod.cluster.registration import RankInfo
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId, RequestId

from .attempt import Legs
from .cost_meter import CostMeter
from .hot_ranks import HotRanks
from .job import Job
from .joint_prefixes import PrefixTakenError
from .placement import Placement, PlacementRequest, PlacementRules, Policy, RemotePrefill, plan_placement
from .prompt_work import PromptWork
from .rank_table import RankTable
from .router_metrics import PLACEMENT_SECONDS
from .shared_prefixes import SharedPrefixes

LOOK_AGAIN_S = 0.1
"""A rank whose stream has just broken may come back without a change of the table: look this often."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request waits for a usable decode rank."""

    first_s: float = 1.0
    """A new one: about what a broken stream takes to be mended."""
    lost_s: float = 4.0
    """One that has lost its rank. Its client hears the truth within 5 s."""


class Placer:
    """For one event loop."""

    def __init__(
        self,
        table: RankTable,
        shared: SharedPrefixes,
        *,
        usable: Callable[[RankInfo], bool],
        rules: PlacementRules,
        patience: Patience,
        retry_max: int,
        meter: CostMeter,
        rng: Random,
        hot: HotRanks | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`usable`: whether a decode rank can be reached now. `hot`: where conversations have been."""
        self._table = table
        self._usable = usable
        self._shared = shared
        self._rules = rules
        self._patience = patience
        self._retry_max = retry_max
        self._meter = meter
        self._rng = rng
        self._clock = clock
        self._hot = hot or HotRanks()
        self._turn = 0
        self._placed: dict[RequestId, asyncio.Future[Placement | None]] = {}
        """Of jobs that are live: where they went, for the other choices of their prompts."""

    def begin(self, job: Job) -> None:
        """A job comes: its other choices may ask where it goes."""
        self._placed[job.request_id] = asyncio.get_running_loop().create_future()

    def end(self, job: Job) -> None:
        """It has gone."""
        placed = self._placed.pop(job.request_id)
        if not placed.done():
            placed.set_result(None)

    def note_generated(self, job: Job, rank: RankId) -> None:
        """A rank has generated for the job: it holds the conversation's state."""
        self._hot.note(rank, session=job.session, hashes=job.block_hashes)

    async def place(
        self, job: Job, number: int, avoid: Collection[RankId], *, wait: Deadline | None = None
    ) -> tuple[Job, Legs]:
        """The job with what is known to be stored of it, and where attempt `number` runs, counted there. Waits for a
        prefix that is being computed, and for a rank if there is none: after a loss, one may be restarting. `wait`: for
        a rank that is known to come, so long.

        Raises UnavailableError if no rank can take it.
        """
        beside, looked_s = await self._other_choice(job), None
        if job.resumed_ids:
            job = await self._shared.looked_up(job)
        elif beside is None and self._rules.policy is Policy.KV and not job.scores_prompt:
            job, looked_s = await self._shared.settled(job)
        patience = wait or job.deadline.earlier(self._patience.first_s if number == 1 else self._patience.lost_s)
        while True:
            try:
                placement = self._plan(job, avoid, beside)
                return job, self._claim(job, number, placement, avoid, looked_s)
            except PrefixTakenError:
                job, looked_s = await self._shared.settled(job)
                continue
            except UnavailableError:
                if patience.expired:
                    raise
            await self._table.wait_for_change(Deadline.after(LOOK_AGAIN_S, self._clock))

    async def _other_choice(self, job: Job) -> Placement | None:
        """Where choice 0 of the same prompt goes, if it is here."""
        placed = self._placed.get(job.branch_of) if job.branch_of is not None else None
        return None if placed is None else await asyncio.shield(placed)

    def _plan(self, job: Job, avoid: Collection[RankId], beside: Placement | None) -> Placement:
        self._turn += 1
        with PLACEMENT_SECONDS.time():
            return plan_placement(
                PlacementRequest(
                    prompt_tokens=job.tokens,
                    stored_tokens=job.stored_tokens,
                    fidelity=job.fidelity,
                    avoid=avoid,
                    hot_rank=self._hot.find(session=job.session, hashes=job.block_hashes),
                    wanted_rank=job.wanted_rank,
                    beside=beside,
                    turn=self._turn,
                ),
                decode=[self._table.candidate(rank) for rank in self._table.decode_ranks() if self._usable(rank)],
                prefill=[self._table.candidate(rank) for rank in self._table.prefill_ranks()],
                rules=self._rules_of(job),
                costs=self._meter.costs,
                rng=self._rng,
            )

    def _rules_of(self, job: Job) -> PlacementRules:
        """To score a prompt a rank computes all of it in all layers, and says so step by step: a decode rank does."""
        return replace(self._rules, remote_prefill=RemotePrefill.NEVER) if job.scores_prompt else self._rules

    def _claim(
        self, job: Job, number: int, placement: Placement, avoid: Collection[RankId], looked_s: float | None
    ) -> Legs:
        """Raises PrefixTakenError, as of `SharedPrefixes.begin`."""
        ranks = self._table.ranks
        new_tokens = job.tokens - job.stored_tokens
        prefill = ranks[placement.prefill] if placement.prefill is not None else None
        others = [
            rank
            for rank in self._table.prefill_ranks()
            if rank.rank_id not in {placement.prefill, *avoid}
            and self._table.candidate(rank).can_hold(job.tokens, job.fidelity)
        ]
        computes = prefill or ranks[placement.decode]
        queued = self._table.candidate(computes).prefill_tokens_queued + new_tokens
        pending = self._shared.begin(job, seconds=self._meter.prompt_s(queued), looked_s=looked_s)
        legs = Legs(
            decode=ranks[placement.decode],
            decode_claim=self._table.claim(placement.decode, prefill_tokens=0 if prefill else new_tokens),
            prefill=prefill,
            prefill_claim=self._table.claim(prefill.rank_id, prefill_tokens=new_tokens) if prefill else None,
            prefill_elsewhere=bool(others) and number <= self._retry_max,
            work=PromptWork(
                self._shared,
                self._meter,
                pending,
                tokens=queued,
                remote=prefill is not None,
                clock=self._clock,
            ),
        )
        placed = self._placed.get(job.request_id)
        if placed is not None and not placed.done():
            placed.set_result(placement)
        return legs
