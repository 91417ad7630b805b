"""The life of a request on one rank: one table, one way to move, reasons apart from phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto


class Phase(Enum):
    WAITING = auto()  # accepted, holds nothing
    LOADING = auto()  # blocks or a snapshot are being fetched; holds device blocks, no compute
    PREFILLING = auto()  # prompt rows are being computed
    DECODING = auto()  # one or more rows a step, tokens come out
    DONE = auto()


class Outcome(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OFF = "handed_off"  # a prefill rank published the request's state


# DONE is reachable from every phase because a client may hang up and a node may die at any time; nothing leaves
# DONE. Going back to WAITING is a preemption, or a load that found less than was promised.
NEXT_PHASES: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.LOADING, Phase.PREFILLING, Phase.DECODING, Phase.DONE}),
    Phase.LOADING: frozenset({Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.DONE}),
    Phase.PREFILLING: frozenset({Phase.WAITING, Phase.DECODING, Phase.DONE}),
    Phase.DECODING: frozenset({Phase.WAITING, Phase.DONE}),
    Phase.DONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where a request is. Immutable: `advance` and `finish` return the next one."""

    phase: Phase = Phase.WAITING
    outcome: Outcome | None = None

    def advance(self, to: Phase) -> Lifecycle:
        assert to is not Phase.DONE, "a request ends through finish(), with a reason"
        assert to in NEXT_PHASES[self.phase], f"{self.phase.name} -> {to.name}"
        return replace(self, phase=to)

    def finish(self, outcome: Outcome) -> Lifecycle:
        assert self.phase is not Phase.DONE, "finished twice"
        return replace(self, phase=Phase.DONE, outcome=outcome)

    @property
    def done(self) -> bool:
        return self.phase is Phase.DONE
