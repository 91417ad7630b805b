"""A rank on its threads, and everything it has said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.engine.engine_world import GREEDY, OPTIONS, RequestMaker, prompt_of, tiny_model
from whalepod.engine.interface import EngineRequest, FinishedEvent, SampledToken, StepEvent, TokensEvent
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import EngineRank
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.state_store import StateStore
from whalepod.model.tensor_layout import ModelRole

WAIT_S = 60.0
AHEAD = replace(OPTIONS, async_scheduling=True)


def tokens_of(events: Sequence[StepEvent]) -> tuple[SampledToken, ...]:
    return tuple(token for event in events if isinstance(event, TokensEvent) for token in event.tokens)


class StartedRank:
    """`start=False`: it accepts requests once `rank.start()` was called."""

    def __init__(
        self,
        *,
        options: RankOptions = AHEAD,
        store: StateStore | None = None,
        role: ModelRole = ModelRole.FULL,
        start: bool = True,
    ) -> None:
        self.said: list[StepEvent] = []
        self.failures: list[BaseException] = []
        self.requests = RequestMaker(tiny_model(role))
        self._changed = threading.Condition()
        self.rank = EngineRank(
            tiny_model(role), options, store=store, on_step=self._on_step, on_failure=self._on_failure
        )
        if start:
            self.rank.start()

    def _on_step(self, events: Sequence[StepEvent]) -> None:
        with self._changed:
            self.said += events
            self._changed.notify_all()

    def _on_failure(self, error: BaseException) -> None:
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()

    def submit(self, tokens: int = 20, sampling: SamplingParams = GREEDY, **kinds: Any) -> EngineRequest:
        request = self.requests.request(prompt_of(tokens), sampling, **kinds)
        self.rank.submit(request)
        return request

    def events(self, request: EngineRequest) -> list[StepEvent]:
        with self._changed:
            return [event for event in self.said if event.request_id == request.request_id]

    def ends(self, request: EngineRequest) -> list[FinishedEvent]:
        return [event for event in self.events(request) if isinstance(event, FinishedEvent)]

    def wait(self, condition: Callable[[], object]) -> None:
        """Until something was said that makes the condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=WAIT_S)

    def end(self, request: EngineRequest) -> FinishedEvent:
        """Wait for the request's end."""
        self.wait(lambda: self.ends(request))
        return self.ends(request)[-1]

    def stop(self) -> None:
        self.rank.stop()
