"""The computing of one prompt, as the router sees it: what others wait for, and what it costs."""

from __future__ import annotations

from whalepod.core.clock import Clock

from .cost_meter import CostMeter
from .pending_prefixes import Pending
from .router_metrics import HANDOFF_EXPOSED_SECONDS
from .shared_prefixes import SharedPrefixes


class PromptWork:
    """Begins when it is made. `tokens`: new ones, and those before them in the rank's queue."""

    def __init__(
        self,
        shared: SharedPrefixes,
        meter: CostMeter,
        pending: Pending | None,
        *,
        tokens: int,
        remote: bool,
        clock: Clock,
    ) -> None:
        self._shared = shared
        self._meter = meter
        self._pending = pending
        self._tokens = tokens
        self._remote = remote
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._ready_s: float | None = None
        self._over = False

    def note_ready(self, *, stored: bool) -> None:
        """The prefill rank has answered."""
        now_s = self._clock.monotonic_s()
        self._meter.note_remote(now_s - self._began_s, tokens=self._tokens)
        self._ready_s = now_s if stored else None
        self._over = not stored
        self._shared.end(self._pending, stored=stored)

    def note_token(self) -> None:
        """Tokens have come from the decode rank. The first time, they say how long the client has waited for it."""
        if self._over:
            return
        self._over = True
        now_s = self._clock.monotonic_s()
        if self._ready_s is not None:
            HANDOFF_EXPOSED_SECONDS.observe(now_s - self._ready_s)
            self._meter.note_handoff(now_s - self._ready_s)
        elif not self._remote:
            self._meter.note_local(now_s - self._began_s, tokens=self._tokens)
        self._shared.end(self._pending, stored=False)

    def end(self) -> None:
        """The attempt is over, or its prefill is lost: whoever waits looks for another way."""
        self._shared.end(self._pending, stored=False)
