"""What an engine has to say since it was last asked, in order."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from whalepod.core.errors import ServingError
from whalepod.core.ids import RequestId

from .finish import Finish
from .interface import (
    FinishedEvent,
    Handoff,
    HandoffEvent,
    PromptTokensEvent,
    SampledToken,
    StepEvent,
    TokensEvent,
)
from .sequence import Sequence


class Report:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._events: list[StepEvent] = []

    def take(self) -> list[StepEvent]:
        """Everything that was added, once."""
        events, self._events = self._events, []
        return events

    def forget(self, request_id: RequestId, attempt: int) -> list[StepEvent]:
        """Nothing that has not been taken yet is said of this request: here is what it would have been."""
        events, self._events, forgotten = self._events, [], list[StepEvent]()
        for event in events:
            of_it = (event.request_id, event.attempt) == (request_id, attempt)
            (forgotten if of_it else self._events).append(event)
        return forgotten

    def tokens(self, sequence: Sequence, tokens: Ordered[SampledToken]) -> None:
        request = sequence.request
        self._events.append(TokensEvent(request.request_id, request.attempt, tuple(tokens), sequence.cached_tokens))

    def prompt_scores(self, sequence: Sequence) -> None:
        """Of the rows that are computed, if they were asked for."""
        if sequence.prompt_scores is None:
            return
        start, tokens = sequence.prompt_scores.told(sequence.computed)
        if tokens:
            request = sequence.request
            self._events.append(PromptTokensEvent(request.request_id, request.attempt, start, tokens))

    def handoff(self, sequence: Sequence, handoff: Handoff) -> None:
        self._events.append(HandoffEvent(sequence.request.request_id, sequence.request.attempt, handoff))

    def end(self, sequence: Sequence, finish: Finish, error: ServingError | None = None) -> None:
        self._events.append(
            FinishedEvent(
                sequence.request.request_id,
                sequence.request.attempt,
                finish.reason,
                error=error,
                matched_stop_id=finish.matched_stop_id,
                cached_tokens=sequence.cached_tokens or 0,
                replayed_tokens=sequence.replayed_tokens,
            )
        )
