"""Keeps the ranks of an expert-parallel group in step. One round:

    agree ─▶ target pass, if any rank has rows for one ─▶ draft pass, likewise ─▶ between steps: swap moved experts

A *pass* is one forward: all its layers' exchanges, in order. A rank without rows for it takes part all the same (a
dummy step: exchanges without rows, no caches, no statistics). A rank's rows depend on no other rank's, so ranks need
not be at the same step of anything: only at the same exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whalepod.core.clock import SYSTEM_CLOCK, Clock

from .dispatch import Dispatcher, DispatchMode, graph_tier, mode_for
from .expert_bank import ExpertBank
from .load_window import LoadWindow
from .placement import Placement
from .timed_transport import TimedTransport
from .transport import GroupBrokenError, Transport

MEAN_WEIGHT = 0.05
GRAPH_TIERS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(slots=True)
class Job:
    """One forward that a rank wants to run. `call` computes it; what it returns or raises is left here."""

    rows: int
    call: Callable[[], Any]
    draft: bool = False
    prompts: bool = False
    """It holds rows of prompts: many, and of a size that nobody knows beforehand."""
    undo: Callable[[], None] | None = None
    """Makes it as if `call` had never begun: the step was aborted and is run again."""
    outcome: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    """What a rank brings to a round. Everything that a round's collective calls depend on is agreed here."""

    target_rows: int = 0
    draft_rows: int = 0
    prompts: bool = False
    staged_layers: int = 0
    """Layers whose moved experts have arrived; -1: moving them failed."""
    reform: bool = False
    """A rank waits to join: end the group after this round."""
    compute_us: int = 0
    """Time that the rank's last pass took beside waiting for the others."""

    def numbers(self) -> list[int]:
        return [
            self.target_rows,
            self.draft_rows,
            int(self.prompts),
            self.staged_layers,
            int(self.reform),
            self.compute_us,
        ]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Vote:
        target, draft, prompts, staged, reform, compute = numbers
        return cls(target, draft, bool(prompts), staged, bool(reform), compute)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The votes of a round, by rank: the same on every rank."""

    votes: tuple[Vote, ...]
    low_latency_rows: int

    def rows(self, *, draft: bool) -> tuple[int, ...]:
        return tuple(vote.draft_rows if draft else vote.target_rows for vote in self.votes)

    def tier(self, *, draft: bool) -> int:
        """Rows that every rank is padded to where shapes are fixed."""
        return graph_tier(max(self.rows(draft=draft)), GRAPH_TIERS)

    def mode(self, *, draft: bool) -> DispatchMode:
        prompts = any(vote.prompts for vote in self.votes) and not draft
        return mode_for(max(self.rows(draft=draft)), prompts=prompts, rows_limit=self.low_latency_rows)

    @property
    def idle(self) -> bool:
        return not any(self.rows(draft=False)) and not any(self.rows(draft=True))

    @property
    def reform(self) -> bool:
        return any(vote.reform for vote in self.votes)

    @property
    def staged_layers(self) -> int:
        return min(vote.staged_layers for vote in self.votes)

    @property
    def padded_share(self) -> float:
        """Share of rows that padding to the busiest rank wastes."""
        rows = self.rows(draft=False)
        return 1 - sum(rows) / (len(rows) * max(rows)) if max(rows) else 0.0


@dataclass(slots=True)
class GroupOptions:
    low_latency_rows: int = 128
    """Steps without prompts and with at most so many rows a rank use the low-latency dispatch."""
    window_steps: int = 1000
    """Steps whose routing counts for EPLB."""


@dataclass(slots=True)
class _Pass:
    mode: DispatchMode
    rows_max: int
    next_layer: int
    stop: int
    """After the last one."""


@dataclass(slots=True)
class GroupStatistics:
    rounds: int = 0
    passes: int = 0
    dummy_passes: int = 0
    compute_seconds: tuple[float, ...] = ()
    """By rank, what a pass takes it beside waiting: a moving mean over passes in which all had about as many rows."""
    compared_passes: int = 0
    padded_share: float = 0.0


class ExpertGroup:
    """One rank in one group, as long as nobody leaves it. For one thread."""

    def __init__(
        self,
        transport: Transport,
        bank: ExpertBank,
        placements: Sequence[Placement],
        *,
        options: GroupOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`placements` of every layer of `bank`, equal on all ranks; the bank holds what they say of this rank."""
        self.transport = TimedTransport(transport, clock)
        self.bank = bank
        self.placements = list(placements)
        self.options = options or GroupOptions()
        self.windows = [LoadWindow(layer.shape.experts, steps=self.options.window_steps) for layer in bank.layers]
        self.statistics = GroupStatistics()
        self._clock = clock
        self._dispatcher = Dispatcher(
            self.transport,
            rows_limit=graph_tier(self.options.low_latency_rows, GRAPH_TIERS),
            chosen_max=max(layer.shape.chosen for layer in bank.layers),
        )
        self._pass: _Pass | None = None
        self._passes = bank.passes()
        self._compute_s = 0.0
        self._comparable = False
        bank.exchange = self._exchange

    def round(self, job: Job | None, *, staged_layers: int = 0, reform: bool = False) -> Agreement:
        """Take part in one round, with or without a job of one's own. The job's `outcome` or `error` is set.

        Raises GroupBrokenError: the job has not been done, though it may have written to the caches.
        """
        agreement = self._agree(
            Vote(
                target_rows=job.rows if job is not None and not job.draft else 0,
                draft_rows=job.rows if job is not None and job.draft else 0,
                prompts=job is not None and job.prompts,
                staged_layers=staged_layers,
                reform=reform,
                compute_us=int(self._compute_s * 1e6),
            )
        )
        for draft in (False, True):
            if any(agreement.rows(draft=draft)):
                own = job if job is not None and job.draft == draft else None
                self._run_pass(own, agreement, draft=draft)
        self.statistics.rounds += 1
        self._compare(agreement)
        self.statistics.padded_share = agreement.padded_share
        return agreement

    def close(self) -> None:
        """Leave: whoever waits for this rank is told. Idempotent, from any thread."""
        self.transport.close()

    def _compare(self, agreement: Agreement) -> None:
        """Votes tell of the pass before."""
        if self._comparable:
            latest = [vote.compute_us / 1e6 for vote in agreement.votes]
            means = self.statistics.compute_seconds or latest
            self.statistics.compute_seconds = tuple(
                mean + MEAN_WEIGHT * (new - mean) for mean, new in zip(means, latest, strict=True)
            )
            self.statistics.compared_passes += 1
        rows = agreement.rows(draft=False)
        self._comparable = 0 < max(rows) <= 2 * min(rows)

    def _agree(self, vote: Vote) -> Agreement:
        gathered = self.transport.gather(torch.tensor(vote.numbers(), dtype=torch.int64))
        votes = tuple(Vote.of(numbers) for numbers in gathered.tolist())
        return Agreement(votes, self.options.low_latency_rows)

    def _run_pass(self, job: Job | None, agreement: Agreement, *, draft: bool) -> None:
        layers = self._passes[draft]
        mode = agreement.mode(draft=draft)
        rows_max = agreement.tier(draft=draft) if mode is DispatchMode.LOW_LATENCY else max(agreement.rows(draft=draft))
        self._pass = _Pass(mode, rows_max, next_layer=layers.start, stop=layers.stop)
        started_s = self._clock.monotonic_s()
        self.transport.waited_s, self.transport.computing_since_s = 0.0, started_s
        if job is not None:
            try:
                job.error = None  # of a try that was aborted
                job.outcome = job.call()
            except GroupBrokenError:
                raise
            except AssertionError:
                self.close()  # it stops this rank; nobody should wait for it
                raise
            except Exception as error:  # noqa: BLE001  the job's owner is told; the others must not wait for this rank
                job.error = error
        while self._pass.next_layer < layers.stop:
            self._exchange_nothing(self._pass.next_layer)
        self._compute_s = self._clock.monotonic_s() - started_s - self.transport.waited_s
        self.statistics.passes += 1
        self.statistics.dummy_passes += job is None
        self.transport.computing_since_s = None
        self._pass = None

    def _exchange_nothing(self, layer: int) -> None:
        experts = self.bank.layers[layer]
        x = experts.gate_up.new_zeros(0, experts.shape.width)
        ids = torch.zeros(0, experts.shape.chosen, dtype=torch.int64, device=x.device)
        self._exchange(layer, x, ids, x.new_zeros(ids.shape))

    def _exchange(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        current = self._pass
        assert current is not None, "a forward outside of the group's round"
        assert layer == current.next_layer, f"layer {layer} is not the next to be exchanged, {current.next_layer} is"
        current.next_layer += 1
        self.windows[layer].add(ids if len(ids) else None)
        out = self._dispatcher.run(
            self.bank.layers[layer],
            self.placements[layer],
            x,
            ids,
            weights,
            mode=current.mode,
            rows_max=current.rows_max,
        )
        if current.next_layer == current.stop:
            self.transport.settle()  # before anybody looks at what came of it, or chooses by it
        return out
