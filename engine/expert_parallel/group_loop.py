"""The thread of a rank on which its group's rounds run, for as long as the rank lives.

    device ─ run(job) ─▶ next round ─▶ done
    no work anywhere: asleep, until a job comes or another rank wakes this one
    a rank is lost: abort the step ▶ form a group without it ▶ read the experts that it alone held ▶ run the job again

Survivors keep their process and their caches. A step that was aborted leaves its sequences as they were (`Job.undo`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whalepod.core.clock import SYSTEM_CLOCK, Clock

from .expert_bank import ExpertBank
from .group import Agreement, ExpertGroup, GroupOptions, Job
from .placement import Placement, replace_lost
from .rebalancing import RebalanceOptions, Rebalancer
from .transport import GroupBrokenError, Transport

log = logging.getLogger(__name__)

ROUNDS_WAITED_FOR = 2
"""A rank that has had no job for so many rounds has nothing to do."""

Held = Mapping[str, Sequence[int]]
"""The expert in each slot of a rank, by layer prefix."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A group that has just formed, as one of its ranks sees it."""

    epoch: int
    """Counts the groups of a pool."""
    members: tuple[int, ...]
    """Indices in the pool, ascending: rank r of the group is `members[r]`."""
    held: tuple[Held, ...]
    """What each holds, by rank of the group."""
    transport: Transport
    mover: Transport
    """Between the same ranks, for what goes on beside the steps."""


class MembershipEndedError(Exception):
    """The rank is stopping: there will be no further group."""


class Membership(Protocol):
    """Finds the other ranks of the pool. `form` is for the loop's thread, the rest for any."""

    def form(self, held: Held) -> Formed:
        """Wait until this rank is in a group. Raises MembershipEndedError."""
        ...

    def wake(self, epoch: int, round_number: int) -> None:
        """Tell the others that there is work in this round. Never waits, may fail."""
        ...


ReadExperts = Callable[[Mapping[str, Sequence[int]]], Mapping[str, Any]]
"""Experts by prefix -> (gate_up, down) by prefix, read from the checkpoint."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    slots_per_rank: Mapping[str, int]
    """By prefix, in a complete group."""
    grace_s: float = 0.005
    """How long a rank that has just worked is waited for, at least, before it takes part without rows."""
    grace_share: float = 0.5
    """The same as a share of the last round: ranks that worked in turn would cost as many rounds as there are."""
    grace_s_max: float = 0.25
    group: GroupOptions | None = None
    rebalancing: RebalanceOptions | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """What operators see."""

    epoch: int = 0
    members: tuple[int, ...] = ()
    balancedness: float = 1.0
    rebalances: int = 0
    padded_share: float = 0.0
    step_seconds: tuple[float, ...] = ()
    """By rank of the group: what a pass takes it beside waiting, a moving mean."""
    compared_passes: int = 0
    """Of which that is the mean."""
    reforms: int = 0
    dummy_passes: int = 0


class GroupLoop:
    """`run` is for one thread at a time; `woken` and `ask_to_reform` for any."""

    def __init__(
        self,
        bank: ExpertBank,
        membership: Membership,
        read_experts: ReadExperts,
        *,
        options: LoopOptions,
        on_failure: Callable[[BaseException], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`on_failure` is called once, on the loop's thread, if it ends by itself."""
        self.bank = bank
        self._membership = membership
        self._read_experts = read_experts
        self._options = options
        self._on_failure = on_failure
        self._clock = clock
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._job_ends = threading.Event()
        self._stopping = False
        self._reform = False
        self._awake_until = 0
        self._round = 0
        self._rounds_without_job = ROUNDS_WAITED_FOR
        self._round_s = 0.0
        """What the last round took."""
        self._formed: Formed | None = None
        self._group: ExpertGroup | None = None
        self._rebalancer: Rebalancer | None = None
        self._failure: BaseException | None = None
        self.ready = threading.Event()
        """The rank has been in a group."""
        self.state = GroupState()
        self._thread = threading.Thread(target=self._main, name="expert-group", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the group. A job that waits fails with GroupBrokenError. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.break_group()
        self._thread.join(10.0)

    def run(self, job: Job) -> Any:  # noqa: ANN401  whatever the job returns
        """Compute a job in step with the group, however often the group has to form anew. Raises what it raises, and
        GroupBrokenError once the loop has ended."""
        with self._changed:
            assert self._job is None, "a rank has one job at a time"
            if self._failure is not None or self._stopping:
                raise GroupBrokenError("this rank has left its group")
            self._job_ends.clear()
            self._job = job
            self._changed.notify_all()
        self._job_ends.wait()
        if job.error is not None:
            raise job.error
        return job.outcome

    def woken(self, epoch: int, round_number: int) -> None:
        """Another rank has work in this round."""
        with self._changed:
            if self._formed is not None and epoch == self._formed.epoch:
                self._awake_until = max(self._awake_until, round_number)
                self._changed.notify_all()

    def ask_to_reform(self) -> None:
        """End the group after the next round, so that somebody can join."""
        with self._changed:
            self._reform = True
            self._changed.notify_all()

    def break_group(self) -> None:
        """A rank of the group is known to be lost: stop waiting for it."""
        group, rebalancer = self._group, self._rebalancer
        if rebalancer is not None:
            rebalancer.close_transport()
        if group is not None:
            group.close()
        with self._changed:
            self._changed.notify_all()

    @property
    def computing_since_s(self) -> float | None:
        """Since when this rank has been computing without having to wait for another; None: it is not."""
        group = self._group
        return None if group is None else group.transport.computing_since_s

    @property
    def forming(self) -> bool:
        return self._formed is None

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._form()
                try:
                    while self._one_round():
                        pass
                except GroupBrokenError as error:
                    if not self._stopping:
                        log.warning("the expert group broke: %s", error)
                finally:
                    self._disband()
        except MembershipEndedError:
            pass
        except BaseException as error:
            log.critical("the expert group's loop failed", exc_info=error)
            self._failure = error
            self._on_failure(error)
        finally:
            with self._changed:
                self._stopping = True
                if self._job is not None:
                    self._finish(self._job, GroupBrokenError("this rank has left its group"))

    def _form(self) -> None:
        held = {layer.prefix: layer.slots for layer in self.bank.layers}
        started_s = self._clock.monotonic_s()
        formed = self._membership.form(held)
        placements = self._adopt(formed)
        group = ExpertGroup(formed.transport, self.bank, placements, options=self._options.group, clock=self._clock)
        rebalancing = self._options.rebalancing or RebalanceOptions()
        with self._changed:
            # All take part in the first round: nobody can be woken before it has formed its side of the group.
            self._round, self._awake_until = 0, 1
            self._reform = False
            self._group, self._rebalancer = group, Rebalancer(group, formed.mover, options=rebalancing)
            self._formed = formed
        self._note(reforms=self.state.reforms + self.ready.is_set())
        self.ready.set()
        log.info(
            "expert group %d: ranks %s, formed in %.2f s", formed.epoch, formed.members,
            self._clock.monotonic_s() - started_s,
        )  # fmt: skip

    def _adopt(self, formed: Formed) -> list[Placement]:
        """The placement that follows from what everybody holds, the same on every rank; read what is missing here."""
        rank = formed.transport.rank
        placements: list[Placement] = []
        missing: dict[str, list[int]] = {}
        for layer in self.bank.layers:
            held = [list(own[layer.prefix]) for own in formed.held]
            capacity = self._options.slots_per_rank[layer.prefix]
            placement = replace_lost(layer.shape.experts, held, capacity=capacity)
            placements.append(placement)
            if lacking := set(placement.ranks[rank]) - set(layer.slots):
                missing[layer.prefix] = sorted(lacking)
        if missing:
            log.warning("reading %d lost experts", sum(map(len, missing.values())))
        read = self._read_experts(missing) if missing else {}
        for layer, placement in zip(self.bank.layers, placements, strict=True):
            layer.rearrange(placement.ranks[rank], missing.get(layer.prefix, ()), read.get(layer.prefix))
        return placements

    def _one_round(self) -> bool:
        """False: the group ends here, by agreement."""
        group, rebalancer = self._group, self._rebalancer
        assert group is not None
        assert rebalancer is not None
        job = self._next_job(group)
        if self._stopping:
            raise GroupBrokenError("this rank is stopping")
        started_s = self._clock.monotonic_s()
        try:
            agreement = group.round(job, staged_layers=rebalancer.staged_layers, reform=self._reform)
        except GroupBrokenError:
            if job is not None and job.undo is not None:
                job.undo()
            raise
        self._round_s = self._clock.monotonic_s() - started_s
        self._after(agreement, job)
        rebalancer.after(agreement)
        self._note(reforms=self.state.reforms)
        return not agreement.reform

    def _after(self, agreement: Agreement, job: Job | None) -> None:
        with self._changed:
            self._round += 1
            self._rounds_without_job = 0 if job is not None else self._rounds_without_job + 1
            if not agreement.idle:
                self._awake_until = max(self._awake_until, self._round + 1)
            if job is not None:
                self._finish(job, job.error)

    def _next_job(self, group: ExpertGroup) -> Job | None:
        """What this rank brings to the next round; waits while no rank has anything to do."""
        with self._changed:
            due = self._round + 1
            if self._awake_until >= due:
                if self._rounds_without_job < ROUNDS_WAITED_FOR:
                    self._changed.wait_for(lambda: self._job or self._stopping, timeout=self._grace_s())
                return self._job
            while not (self._job or self._stopping or self._reform or self._awake_until >= due):
                self._changed.wait()
                if group.transport.broken:
                    raise GroupBrokenError("the group was closed while it slept")
            if self._awake_until < due and not self._stopping:
                formed = self._formed
                assert formed is not None
                self._awake_until = due
                self._membership.wake(formed.epoch, due)
            return self._job

    def _grace_s(self) -> float:
        options = self._options
        return min(max(options.grace_s, options.grace_share * self._round_s), options.grace_s_max)

    def _finish(self, job: Job, error: Exception | None) -> None:
        job.error = error
        self._job = None
        self._job_ends.set()

    def _disband(self) -> None:
        """Let go of the group, so that nobody waits for this rank in it."""
        with self._changed:
            group, rebalancer = self._group, self._rebalancer
            self._formed = self._group = self._rebalancer = None
        if rebalancer is not None:
            rebalancer.close()
        if group is not None:
            group.close()

    def _note(self, *, reforms: int) -> None:
        formed, group, rebalancer = self._formed, self._group, self._rebalancer
        assert formed is not None
        assert group is not None
        assert rebalancer is not None
        self.state = GroupState(
            epoch=formed.epoch,
            members=formed.members,
            balancedness=rebalancer.balancedness,
            rebalances=rebalancer.rebalances,
            padded_share=group.statistics.padded_share,
            step_seconds=group.statistics.compute_seconds,
            compared_passes=group.statistics.compared_passes,
            reforms=reforms,
            dummy_passes=group.statistics.dummy_passes,
        )
