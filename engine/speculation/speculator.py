"""Drafts for the requests of a step, and how many of them it verifies. On the device's side: nothing here is known to
the host before the step comes back.

    anchors ─▶ drafter ─▶ ids, laws, log-odds ─▶ lengths ─▶ proposals
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whalepod.core.clock import Clock
from whalepod.engine.sampling import DrawRow, Ids, Logits, Sampler, are_numbers, draw_ids, process_rows
from whalepod.kernels.numerics import whole_batches
from whalepod.model.draft import Anchor, Chooser, Drafts

from .options import DraftSampling, SpeculationOptions, Verification
from .scheduling import Counts, allot, stop_early, survivals
from .statistics import SpeculationWork, VerifiedRequest

log = logging.getLogger(__name__)

DraftCall = Callable[[Sequence[Anchor], Chooser, int], Drafts]
"""(anchors, chooser, drafts of each) -> the drafts"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose next tokens are drafted. Its sampler has observed every token up to the anchor."""

    sampler: Sampler
    anchor: Anchor
    drafts_max: int
    """More could not be said, or have no room."""
    coupled: bool
    """Its drafts are judged by coupling: they share the target's noise."""
    trims: bool
    """How many of its drafts are verified, and the last bits of their logits, may depend on other requests."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of one request that are verified."""

    drafts: tuple[int, ...] = ()
    laws: Logits | None = None
    """[drafts, vocab] log-weights that each was drawn from; None: coupled."""


@dataclass(frozen=True, slots=True)
class Round:
    """One drafting round."""

    proposals: tuple[Proposal, ...]
    limits: Counts
    """[candidates] drafts that there are."""
    log_odds: NDArray[np.floating[Any]] | None
    """[candidates, columns]"""
    survival: NDArray[np.floating[Any]] | None
    """[candidates, columns]"""
    budget: int | None
    seconds: float

    def work(self, accepted: Sequence[int]) -> SpeculationWork:
        """`accepted`: how many drafts of each candidate stood."""
        requests = tuple(
            VerifiedRequest(
                drafted=int(self.limits[index]),
                verified=len(proposal.drafts),
                accepted=accepted[index],
                log_odds=None if self.log_odds is None else self.log_odds[index],
                survival=None if self.survival is None else self.survival[index],
            )
            for index, proposal in enumerate(self.proposals)
        )
        return SpeculationWork(requests, self.budget, self.seconds)


class Speculator:
    """Belongs to the thread that computes steps."""

    def __init__(self, options: SpeculationOptions, draft: DraftCall, *, clock: Clock) -> None:
        self.options = options
        self._draft = draft
        self._clock = clock
        temperatures = options.calibration.temperatures if options.calibration else [1.0] * options.draft_tokens
        self._temperatures = np.array(temperatures)

    def propose(self, candidates: Sequence[Candidate], budget: int | None) -> Round | None:
        """Drafts for all candidates, and the best `budget` of them (None: all). None: drafting failed, which costs
        the step its drafts and nothing else. Raises AssertionError if an invariant is broken."""
        started_s = self._clock.monotonic_s()
        chooser = _DraftChooser(candidates, greedy=self.options.draft_sampling is DraftSampling.GREEDY)
        try:
            with whole_batches(all(each.trims for each in candidates)):
                drafts = self._draft([each.anchor for each in candidates], chooser.choose, self.options.draft_tokens)
        except AssertionError:
            raise
        except Exception:
            log.exception("drafting failed: this step has no drafts")
            return None
        log_odds = None if drafts.confidence is None else drafts.confidence.double().cpu().numpy()
        survival = None if log_odds is None else survivals(log_odds, self._temperatures, chooser.limits)
        lengths = self._lengths(candidates, chooser.limits, survival, budget)
        proposals = tuple(
            Proposal(
                tuple(int(token) for token in chooser.ids[index, :length]),
                None if candidates[index].coupled else chooser.laws_of(index, length),
            )
            for index, length in enumerate(lengths.tolist())
        )
        seconds = self._clock.monotonic_s() - started_s
        return Round(proposals, chooser.limits, log_odds, survival, budget, seconds)

    def _lengths(
        self,
        candidates: Sequence[Candidate],
        limits: Counts,
        survival: NDArray[np.floating[Any]] | None,
        budget: int | None,
    ) -> Counts:
        """Drafts that are verified. A request that may not be trimmed keeps all of its own."""
        options = self.options
        trims = np.array([each.trims for each in candidates])
        fixed = options.verification is Verification.FIXED and options.forced_budget is None
        if survival is None or fixed or not trims.any():
            return limits
        if options.verification is Verification.EARLY_STOP:
            if options.cost is None:
                return limits
            budget = int(stop_early(survival[trims], options.cost))
        elif budget is None:
            return limits
        else:
            budget = max(0, budget - int(limits[~trims].sum()))
        lengths = limits.copy()
        lengths[trims] = allot(survival[trims], budget)
        return lengths


class _DraftChooser:
    """Draws the drafts of a round, column by column, and remembers what from.

    A draft's law is the request's own: its temperature, penalties and cut-offs apply to drafts as to tokens, which
    makes them stand more often. A grammar does not: the device does not know it.
    """

    def __init__(self, candidates: Sequence[Candidate], *, greedy: bool) -> None:
        self._candidates = candidates
        self._greedy = greedy
        self._columns: list[Ids] = []
        self._keeps_laws = any(not each.coupled for each in candidates)
        self._laws: list[Logits] = []
        self.limits: Counts = np.array([each.drafts_max for each in candidates], np.int64)

    @property
    def ids(self) -> Ids:
        """[candidates, columns]"""
        return np.stack(self._columns, axis=1)

    def laws_of(self, index: int, length: int) -> Logits:
        """[length, vocab]"""
        if not length:
            return np.empty((0, 0), np.float32)
        return np.stack([laws[index] for laws in self._laws[:length]])

    def choose(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """A draft of every candidate. Where the logits are no numbers, its drafts end before."""
        values = logits.float().cpu().numpy()
        good = are_numbers(values)
        if not good.all():
            self.limits[~good] = np.minimum(self.limits[~good], number)
            values = np.where(good[:, None], values, np.float32(0))
        rows = [
            DrawRow(
                each.sampler,
                each.anchor.position + 1 + number,
                drafts=tuple(int(column[index]) for column in self._columns),
            )
            for index, each in enumerate(self._candidates)
        ]
        weights = process_rows(values, rows)
        if self._greedy:
            ids = weights.argmax(axis=1)
            weights = np.full_like(weights, -np.inf)
            weights[np.arange(len(ids)), ids] = 0
        else:
            ids = draw_ids(weights, rows, columns=[None if each.coupled else number for each in self._candidates])
        self._columns.append(ids)
        if self._keeps_laws:
            self._laws.append(weights)
        return torch.from_numpy(ids).to(logits.device)
