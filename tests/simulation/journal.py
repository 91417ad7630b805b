"""What has happened in a run, in order: a hash of all of it, and the last of it in words."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tests.simulation.virtual_time import SimulatedClock

LINES_KEPT = 60


@dataclass(slots=True)
class Journal:
    """`digest` tells two runs apart in whatever they noted, in which order, or when."""

    clock: SimulatedClock
    lines_kept: int | None = LINES_KEPT
    """None: all."""
    events: int = 0
    lines: deque[str] = field(init=False)
    seen: Counter[str] = field(default_factory=Counter[str])
    """How often what has happened."""
    _hash: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def __post_init__(self) -> None:
        self.lines = deque(maxlen=self.lines_kept)

    def note(self, *what: object) -> None:
        line = f"{self.clock.now_s:10.6f} {' '.join(map(str, what))}"
        self.events += 1
        self.lines.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
