"""Is reading a stored block quicker than computing it again? From what this rank has measured (`kvstore.md` §5.2).

read if bytes / measured speed of the source < 0.7 · rows · measured time of a row
"""

from __future__ import annotations

from .interface import StepWork

WORTH_FACTOR = 0.7
"""Reading also costs somebody a connection and this rank a copy."""
SHARE_OF_NEWEST = 0.1
"""Weight of the newest step in the estimate."""
PROMPT_ROWS_MIN = 64
"""A step of fewer rows says more about what a step costs than about what a row does."""
SOFT_DEADLINE_S_MIN = 0.25
"""However quickly a prefix would be computed, a read of it gets this long."""


class FetchWorth:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._row_s: float | None = None

    def note_step(self, work: StepWork) -> None:
        """A step has come back. Those of prompts count, without rows of requests that generate."""
        if work.prompt_rows < PROMPT_ROWS_MIN or work.decode_rows or work.seconds <= 0:
            return
        row_s = work.seconds / work.prompt_rows
        self._row_s = row_s if self._row_s is None else self._row_s + SHARE_OF_NEWEST * (row_s - self._row_s)

    def forget(self) -> None:
        """Nothing was measured so far."""
        self._row_s = None

    def block_s(self, block_tokens: int) -> float | None:
        """How long the reading of one block may take to be worth it; None: nothing was measured, so it is."""
        return None if self._row_s is None else WORTH_FACTOR * block_tokens * self._row_s

    def soft_deadline_s(self, rows: int, *, at_most_s: float) -> float:
        """When to go on with what has arrived of a prefix of so many rows: once it could have been computed."""
        if self._row_s is None:
            return at_most_s
        return min(at_most_s, max(SOFT_DEADLINE_S_MIN, rows * self._row_s))
