"""One rank: an engine on its own thread, with a mailbox in front and the store's I/O beside it.

    submit / cancel / hand_off ──▶ mailbox ──▶ loop thread ──▶ on_step([event, …])
                                                │  ▲
                                         loads, writes  results
                                                ▼  │
                                            KV worker threads ──▶ store
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.ids import RequestId
from whalepod.kvstore.client import KvClient

from .interface import EngineRequest, Handoff, RankLimits, RankLoad, StepEvent
from .options import RankOptions
from .rank_model import RankModel


class EngineRank:
    """Thread-safe. `on_step` is called on the loop's thread, once a step with everything the step produced, in order.

    It must return quickly and must not raise. `on_failure` is called once if the rank stops by itself (a broken
    invariant): every request has then ended with WorkerLostError, and the process should exit.
    """

    def __init__(
        self,
        model: RankModel,
        options: RankOptions,
        *,
        store: KvClient | None,
        on_step: Callable[[Sequence[StepEvent]], None],
        on_failure: Callable[[BaseException], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Allocates the caches. The store stays the caller's: close it after `stop`. Raises ConfigError if the memory plan
        does not fit."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the loop and the workers. Once."""
        raise NotImplementedError

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End every request with WorkerLostError, then the threads. Idempotent."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Accept a request; its events follow on `on_step`. Returns at once.

        A higher attempt of a request that is here ends the lower one with StaleAttemptError. Raises, and then nothing
        follows: CapacityError (queue or soft slots full), ContextLengthError, InvalidFieldError, StaleAttemptError,
        WorkerLostError (not running).
        """
        raise NotImplementedError

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request. When this has returned, nothing more is reported for it. Unknown or ended: does nothing."""
        raise NotImplementedError

    def hand_off(self, request_id: RequestId, attempt: int, handoff: Handoff) -> None:
        """What the prefill rank left for a request submitted with `await_handoff`. Not stored or boundary 0: the prompt is
        computed here. Unknown, ended or repeated: does nothing."""
        raise NotImplementedError

    def load(self) -> RankLoad:
        """As of the last step; never waits."""
        raise NotImplementedError

    @property
    def limits(self) -> RankLimits:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Started, not stopped and not failed."""
        raise NotImplementedError
