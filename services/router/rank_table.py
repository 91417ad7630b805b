"""The ranks a router can use, and what it knows of them beyond their registrations.

registration ──▶ directory ──▶ RankTable ──▶ candidates of a placement
every reply's load ─────────────▲   ▲───── this router's own dispatches, claimed and released
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import RankLoad

from .cost_meter import CostMeter
from .placement import Candidate

LATE_SHARE = 0.1
"""Of the prompt tokens given to a rank, this share is always taken to be before a newcomer."""

REQUESTS_PER_SLOT = 2
"""As many again as run: they wait for their hand-off meanwhile. More wait better here, where any rank may take them."""


LOAD_BELIEVED_S = 10.0
"""A load that is older is no news: ranks register every second and say their load with every step. What others have
given to a rank whose registrations fail is then not known, and it is taken for idle beside what is given to it here."""

SUCCESSOR_S = 30.0
"""After a rank that drained has gone, another process is expected to take its place for so long."""


NO_INCARNATION = Incarnation(0)
"""Of a rank that takes work."""


class RankDirectory(Protocol):
    """Says which ranks exist: the registry, or addresses given on the command line."""

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        """Replaced when it changes, and never changed in place."""
        ...

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        """A link to the rank broke. It leaves `ranks` until it answers again."""
        ...


@dataclass(slots=True)
class _Work:
    requests: int = 0
    prefill_tokens: int = 0
    """Of prompts that are not finished."""
    counted_from_s: float = 0.0
    """Since when the rank has been at the first of them."""

    def tokens_left(self, now_s: float, row_s: float | None) -> int:
        """An estimate: what it has computed since it began the first one is no longer before anybody. A rank that is
        late is not taken for idle."""
        if row_s is None:
            return self.prefill_tokens
        done = (now_s - self.counted_from_s) / row_s
        return int(max(LATE_SHARE * self.prefill_tokens, self.prefill_tokens - done))


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's load, and what of it is not this router's."""

    incarnation: Incarnation
    registered_ms: int
    load: RankLoad
    requests_elsewhere: int
    prefill_tokens_elsewhere: int
    heard_at_s: float


@dataclass(frozen=True, slots=True)
class _Takers:
    """The ranks of one mapping that take new work, and what follows from them: a request asks for it several times."""

    ranks: Mapping[RankId, RankInfo]
    prefill: Sequence[RankInfo]
    decode: Sequence[RankInfo]
    vision: Sequence[RankInfo]
    context_tokens_max: int | None
    decode_drains: bool
    """A decode rank is about to end."""

    @classmethod
    def of(cls, ranks: Mapping[RankId, RankInfo], takes_work: Callable[[RankInfo], bool]) -> _Takers:
        takers = [info for info in ranks.values() if takes_work(info)]
        decode = [info for info in takers if info.role is RankRole.DECODE]
        return cls(
            ranks,
            prefill=[info for info in takers if info.role.is_prefill],
            decode=decode,
            vision=[info for info in takers if info.role is RankRole.VISION],
            context_tokens_max=max((info.context_tokens_max for info in decode), default=None),
            decode_drains=len(decode) < sum(info.role is RankRole.DECODE for info in ranks.values()),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A candidate as it was made last, and what it was made of. None of its prompts was being computed here."""

    info: RankInfo
    report: _Report
    requests: int
    candidate: Candidate


@dataclass(slots=True, eq=False)
class Claim:
    """One dispatch on one rank, counted from now until `release`, which may be called twice."""

    _work: _Work
    prefill_tokens: int
    _clock: Clock
    _held: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not self._work.prefill_tokens:
            self._work.counted_from_s = self._clock.monotonic_s()
        self._work.requests += 1
        self._work.prefill_tokens += self.prefill_tokens

    def finish_prefill(self) -> None:
        """The prompt has been computed; the request may go on, and the rank begins with the next one."""
        if self.prefill_tokens:
            self._work.prefill_tokens -= self.prefill_tokens
            self._work.counted_from_s = self._clock.monotonic_s()
            self.prefill_tokens = 0

    def release(self) -> None:
        if self._held:
            self._held = False
            self.finish_prefill()
            self._work.requests -= 1


class Drains(Protocol):
    """Which process of a rank is known to take no new work."""

    def get(self, rank: RankId) -> Incarnation | None: ...

    def put(self, rank: RankId, incarnation: Incarnation) -> None: ...


class OwnDrains:
    """Of a router that is one process."""

    def __init__(self) -> None:
        self._drains: dict[RankId, Incarnation] = {}

    def get(self, rank: RankId) -> Incarnation | None:
        return self._drains.get(rank)

    def put(self, rank: RankId, incarnation: Incarnation) -> None:
        self._drains[rank] = incarnation


class RankTable:
    """One router's view of the ranks. For one event loop."""

    def __init__(
        self,
        directory: RankDirectory,
        *,
        meter: CostMeter | None = None,
        drains: Drains | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`meter`: knows how fast ranks compute. `drains`: outlives this process, if there are several."""
        self._directory = directory
        self._meter = meter or CostMeter()
        self._clock = clock
        self._work: dict[RankId, _Work] = {}
        self._reports: dict[RankId, _Report] = {}
        self._said_draining = drains or OwnDrains()
        """By a refusal, which comes before the registration that says it too, or by an operator."""
        self._drains = False
        self._drained_at_s: float | None = None
        """When a decode rank was last known to drain."""
        self._changed = asyncio.Event()
        self._takers_known: _Takers | None = None
        self._seen: dict[RankId, _Seen] = {}

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        return self._directory.ranks

    def prefill_ranks(self) -> Sequence[RankInfo]:
        """Prefill ranks that take new work."""
        return self._takers.prefill

    def decode_ranks(self) -> Sequence[RankInfo]:
        """Decode ranks that take new work."""
        return self._takers.decode

    def vision_ranks(self) -> Sequence[RankInfo]:
        """Vision ranks that take new work."""
        return self._takers.vision

    @property
    def context_tokens_max(self) -> int | None:
        """The most that a decode rank holds which takes new work; None: there is none."""
        return self._takers.context_tokens_max

    def room(self) -> int | None:
        """Requests that the decode ranks take at a time from this router, beside those of others; at least one each, so
        that a router that comes last gets its turn. None: there is no rank, and whoever comes shall hear it soon."""
        reports = [self._report(info) for info in self.decode_ranks()]
        rooms = [REQUESTS_PER_SLOT * one.load.slots_total - one.requests_elsewhere for one in reports]
        return sum(max(1, room) for room in rooms) or None

    def candidate(self, info: RankInfo) -> Candidate:
        work = self._work.get(info.rank_id) or _Work()
        report = self._report(info)
        seen = self._seen.get(info.rank_id)
        if (
            seen is not None
            and seen.info is info
            and seen.report is report
            and seen.requests == work.requests
            and not work.prefill_tokens
        ):
            return seen.candidate
        row_s: float | None = None
        if work.prefill_tokens:
            costs = self._meter.costs
            row_s = costs.remote_s_per_token if info.role.is_prefill else costs.local_s_per_token
        candidate = Candidate(
            rank_id=info.rank_id,
            load=report.load,
            requests_elsewhere=report.requests_elsewhere,
            prefill_tokens_elsewhere=report.prefill_tokens_elsewhere,
            context_tokens_max=info.context_tokens_max,
            fidelities=info.fidelities,
            requests_here=work.requests,
            prefill_tokens_here=work.tokens_left(self._clock.monotonic_s(), row_s),
        )
        if not work.prefill_tokens:
            self._seen[info.rank_id] = _Seen(info, report, work.requests, candidate)
        return candidate

    def claim(self, rank_id: RankId, *, prefill_tokens: int = 0) -> Claim:
        """Count a dispatch on a rank at once, before any report shows it."""
        return Claim(self._work.setdefault(rank_id, _Work()), prefill_tokens, self._clock)

    def note_load(self, info: RankInfo, load: RankLoad) -> None:
        """A reply carried the rank's load. It stands until the rank's next registration."""
        current = self.ranks.get(info.rank_id)
        if current is not None and current.incarnation == info.incarnation:
            self._reports[info.rank_id] = self._new_report(current, load)

    def report_lost(self, info: RankInfo) -> None:
        self._directory.report_lost(info.rank_id, info.incarnation)

    def note_draining(self, info: RankInfo) -> None:
        """The rank refused work because it drains, or an operator wants it so. It takes none again: what comes in its
        place is another process."""
        self._said_draining.put(info.rank_id, info.incarnation)
        self._takers_known = None
        self._note_drains()

    def readmit(self, info: RankInfo) -> None:
        """It takes work after all, unless it says itself that it drains."""
        self._said_draining.put(info.rank_id, NO_INCARNATION)
        self._takers_known = None
        self.wake()

    def takes_work(self, info: RankInfo) -> bool:
        return not info.draining and self._said_draining.get(info.rank_id) != info.incarnation

    def wake(self) -> None:
        """The directory's ranks changed."""
        self._note_drains()
        self._changed.set()

    def awaits_successor(self) -> bool:
        """Whether a decode rank drains, or did so before it went lately: another process takes its place."""
        self._note_drains()
        return self._drained_at_s is not None and self._clock.monotonic_s() - self._drained_at_s < SUCCESSOR_S

    def _note_drains(self) -> None:
        drained = self._drains
        self._drains = self._takers.decode_drains
        if drained or self._drains:
            self._drained_at_s = self._clock.monotonic_s()

    async def wait_for_change(self, deadline: Deadline) -> None:
        """Returns after the next change of the directory's ranks, or at the deadline."""
        self._changed.clear()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._changed.wait()
        except TimeoutError:
            return

    @property
    def _takers(self) -> _Takers:
        ranks, known = self.ranks, self._takers_known
        if known is None or known.ranks is not ranks:
            known = self._takers_known = _Takers.of(ranks, self.takes_work)
            self._seen = {name: seen for name, seen in self._seen.items() if name in ranks}
        return known

    def _report(self, info: RankInfo) -> _Report:
        """The last reply's, unless the rank has registered again since; of one that says nothing any more, nothing."""
        report = self._reports.get(info.rank_id)
        if report is None or report.registered_ms != info.time_unix_ms or report.incarnation != info.incarnation:
            report = self._reports[info.rank_id] = self._new_report(info, info.load)
        elif self._clock.monotonic_s() - report.heard_at_s > LOAD_BELIEVED_S:
            load = report.load
            idle = RankLoad(blocks_free=load.blocks_total, blocks_total=load.blocks_total, slots_total=load.slots_total)
            report = self._reports[info.rank_id] = self._new_report(info, idle)
        return report

    def _new_report(self, info: RankInfo, load: RankLoad) -> _Report:
        """What is here now is part of what the rank says, or has not reached it yet: the rest is others'."""
        work = self._work.get(info.rank_id, _Work())
        return _Report(
            incarnation=info.incarnation,
            registered_ms=info.time_unix_ms,
            load=load,
            requests_elsewhere=max(0, load.running + load.waiting - work.requests),
            prefill_tokens_elsewhere=max(0, load.prefill_tokens_queued - work.prefill_tokens),
            heard_at_s=self._clock.monotonic_s(),
        )
