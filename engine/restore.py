"""Decides how a sequence meets state that it did not compute: prefix hit, hand-off, resume. Pure.

There are two ways to have the windows at a boundary: a snapshot, or replaying rows before it. What is exact about the
result follows from what was used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .boundaries import Boundaries
from .interface import Fidelity


class Source(Enum):
    """Where the windows at the boundary come from."""

    OWN_SNAPSHOT = "own snapshot"
    """Of this request: a hand-off, or parked by a preemption."""
    TURN_SNAPSHOT = "turn snapshot"
    """Of an earlier request with the same prefix."""
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class SnapshotAt:
    boundary: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Available:
    """What was found of a sequence's prefix."""

    blocks: int
    """Leading full blocks whose global KV is on the device."""
    blocks_exact: int
    """Of those, the leading ones that never passed an approximate replay."""
    own_snapshot: SnapshotAt | None = None
    turn_snapshot: SnapshotAt | None = None


@dataclass(frozen=True, slots=True)
class RestorePlan:
    source: Source
    boundary: int
    """Global KV and windows are as if all rows below this had been computed here, once replay is done."""
    start: int
    """First row to compute. Below `boundary` if rows are replayed."""
    window_start: int
    """No window row below this may be read."""
    write_start: int
    """Global rows below this are there and are not written again."""
    windows_exact_from: int
    """If `exact`: window rows up to the last KV source from here on are what a cold computation gives."""
    exact: bool
    """The state is what a cold computation gives, and so is everything computed from it."""

    @property
    def replayed_tokens(self) -> int:
        return self.boundary - self.start


def plan_restore(
    available: Available, *, prompt_tokens: int, fidelity: Fidelity, boundaries: Boundaries
) -> RestorePlan:
    """Where to resume. A plan with boundary 0 is a miss: compute everything.

    Fidelity `exact` uses nothing approximate: exact blocks only, and replays the whole halo if there is no snapshot.
    `fast` replays W rows. What a hit replays, and R, follow from R and L alone.
    """
    strict = fidelity is Fidelity.EXACT
    usable = available.blocks_exact if strict else available.blocks
    blocks_exact = usable <= available.blocks_exact
    own = available.own_snapshot
    if own is not None and own.boundary // boundaries.block_tokens <= usable and (own.exact or not strict):
        return _from_snapshot(
            Source.OWN_SNAPSHOT, own.boundary, exact=own.exact and blocks_exact, boundaries=boundaries
        )
    boundary = boundaries.hit(stored_tokens=usable * boundaries.block_tokens, prompt_tokens=prompt_tokens)
    if strict and boundary and available.turn_snapshot == SnapshotAt(boundary, exact=True):
        plan = _from_snapshot(Source.TURN_SNAPSHOT, boundary, exact=True, boundaries=boundaries)
        # More may be there than a hit uses: a hand-off whose snapshot is gone wanted its blocks up to L.
        return replace(plan, write_start=usable * boundaries.block_tokens)
    start = boundaries.replay_start(boundary=boundary, prompt_tokens=prompt_tokens, exact=strict)
    halo_start = boundaries.replay_start(boundary=boundary, prompt_tokens=prompt_tokens, exact=True)
    return RestorePlan(
        source=Source.REPLAY,
        boundary=boundary,
        start=start,
        window_start=start,
        write_start=usable * boundaries.block_tokens,
        windows_exact_from=boundaries.windows_exact_from(start),
        exact=blocks_exact and start <= halo_start,
    )


def _from_snapshot(source: Source, boundary: int, *, exact: bool, boundaries: Boundaries) -> RestorePlan:
    window_start = boundaries.window_start(boundary)
    return RestorePlan(
        source=source,
        boundary=boundary,
        start=boundary,
        window_start=window_start,
        write_start=boundary,
        windows_exact_from=window_start,
        exact=exact,
    )
