"""What prompts have cost lately, measured on the way: the ground of placement and of honest waiting times."""

from __future__ import annotations

from .placement import Costs

SMOOTHING = 0.1
"""Weight of the newest sample."""

SAMPLE_TOKENS_MIN = 32
"""A shorter prompt says more about fixed costs than about rows."""


class CostMeter:
    """For one event loop."""

    def __init__(self) -> None:
        self._remote: float | None = None
        self._local: float | None = None
        self._handoff: float | None = None

    @property
    def costs(self) -> Costs:
        return Costs(self._remote, self._local, self._handoff or 0.0)

    def note_remote(self, seconds: float, *, tokens: int) -> None:
        """A prefill rank took so long for a prompt; `tokens` are those before it in the queue and its own."""
        if tokens >= SAMPLE_TOKENS_MIN:
            self._remote = _smoothed(self._remote, seconds / tokens)

    def note_local(self, seconds: float, *, tokens: int) -> None:
        """A decode rank took so long from the dispatch of a prompt to its first token."""
        if tokens >= SAMPLE_TOKENS_MIN:
            self._local = _smoothed(self._local, seconds / tokens)

    def note_handoff(self, seconds: float) -> None:
        """From READY to the first token."""
        self._handoff = _smoothed(self._handoff, seconds)

    def prompt_s(self, tokens: int) -> float | None:
        """How long a prompt of so many new tokens takes on an idle prefill rank. None: not measured."""
        return None if self._remote is None else tokens * self._remote


def _smoothed(average: float | None, sample: float) -> float:
    return sample if average is None else average + SMOOTHING * (sample - average)
