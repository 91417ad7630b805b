"""The short way of a token: from a rank's step message to its client's connection in one call.

    step message ─▶ Inbox.put ─▶ relay: burst ─▶ text, or chunks ─▶ event ─▶ connection
                        └─ not taken ─▶ the task that reads the inbox

The long way wakes the request's task, which goes down through a generator for each stage and up again: several times
what the stages themselves cost. A relay is the same stages as functions. It is used only while that task waits for the
next token, so nothing of an earlier one is still on its way and the order holds. Everything else goes the long way: the
first event and the last, errors, stop strings, clients that do not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Relay(Generic[T]):
    """Takes items at once."""

    __slots__ = ("_stages", "is_open")

    def __init__(self, is_open: Callable[[], bool], push: Callable[[T], object]) -> None:
        self.is_open = is_open
        """Asked before each `push`."""
        self._stages: tuple[Callable[[Any], Any], ...] = (push,)

    def push(self, item: T) -> None:
        for stage in self._stages:
            item = stage(item)

    def through(self, stage: Callable[[S], T]) -> Relay[S]:
        """A relay of what `stage` makes these items of."""
        relay: Relay[S] = Relay(self.is_open, stage)
        relay._stages = (stage, *self._stages)
        return relay
