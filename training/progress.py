"""How far a run is, by steps and by a clock, and where its figures go."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whalepod.core.clock import Clock
from whalepod.core.progress import ProgressReport


@dataclass(slots=True)
class Progress:
    """A run ends after `steps` steps, or earlier when `seconds` are over; learning rates follow whichever is nearer.

    A run that no clock ended is repeated exactly by the same number of steps."""

    clock: Clock
    steps: int
    seconds: float | None
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """What was before does not count."""
        self.started_s = self.clock.monotonic_s()

    @property
    def elapsed_s(self) -> float:
        return self.clock.monotonic_s() - self.started_s

    def share(self, step: int) -> float:
        """0 to 1."""
        by_clock = 0.0 if self.seconds is None else self.elapsed_s / self.seconds
        return min(1.0, max(step / self.steps, by_clock))

    def steps_likely(self, step: int) -> float:
        """How many it will be if the rest goes as fast as what was."""
        share = self.share(step)
        return step / share if share > 0 else self.steps

    def shown(self, what: str, *, step: int) -> ProgressReport:
        """A bar for whoever looks on; a `FigureLog` has lines for others. `step` of the run are done."""
        report = ProgressReport(what, unit="steps", total=self.steps, clock=self.clock)
        report.begin_at(step)
        return report


class FigureLog:
    """JSON objects, one a line, in a file and on standard output."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, figures: dict[str, Any]) -> None:
        line = json.dumps(
            {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
        )
        for out in (self._file, sys.stdout):
            out.write(line + "\n")
            out.flush()
