"""How much of a prompt need not be computed: what the store holds, and what somebody is computing right now.

job ──▶ settled ──▶ (wait for another request's prompt) ──▶ job with the prefix it will find ──▶ begin ──▶ end
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from whalepod.core.clock import Clock, Deadline

from .cost_meter import CostMeter
from .job import Job
from .pending_prefixes import Pending, PendingPrefixes, Share
from .router_metrics import PREFIX_WAIT_SECONDS, PREFIX_WAITS

UNMEASURED_S = 10.0
"""How long a prompt is expected to take before any was measured."""

PATIENCE_FACTOR = 2.0
PATIENCE_EXTRA_S = 1.0
"""Computing a prefix again takes as long as it is expected to take now; expectations are rough."""


class SharedPrefixes:
    """For one event loop."""

    def __init__(
        self,
        *,
        block_tokens: int,
        tokens_min: int,
        meter: CostMeter,
        stored_blocks: Callable[[Job], Awaitable[int]],
        clock: Clock,
    ) -> None:
        """`tokens_min`: fewer tokens are not waited for. `stored_blocks` asks the store, with a bound of its own."""
        self._block_tokens = block_tokens
        self._tokens_min = tokens_min
        self._meter = meter
        self._stored_blocks = stored_blocks
        self._clock = clock
        self._pending = PendingPrefixes()

    async def settled(self, job: Job) -> Job:
        """The job with the stored prefix that it will find. While somebody computes more of its prefix, it waits, at
        most about as long as computing that again would take."""
        patience: Deadline | None = None
        began_s = self._clock.monotonic_s()
        while (share := self._share(job)) is not None:
            tokens = share.depth_blocks * self._block_tokens
            if share.pending.stored:
                job = self._with_stored(job, tokens)
                break
            if tokens - job.stored_tokens < self._tokens_min:
                break
            patience = patience or job.deadline.earlier(self._patience_s(share, tokens - job.stored_tokens))
            if patience.expired:
                PREFIX_WAITS.labels("given_up").inc()
                return job
            await self._wait(share, patience)
            if not share.pending.stored:
                job = await self.looked_up(job)
        if patience is not None:
            PREFIX_WAITS.labels("shared").inc()
            PREFIX_WAIT_SECONDS.observe(self._clock.monotonic_s() - began_s)
        return job

    async def looked_up(self, job: Job) -> Job:
        """The job with what the store holds of it now."""
        return self._with_stored(job, await self._stored_blocks(job) * self._block_tokens)

    def begin(self, job: Job, *, seconds: float | None) -> Pending | None:
        """A rank is about to compute the rest of the prompt. None: too little for others to wait for."""
        if len(job.prompt_ids) - job.stored_tokens < self._tokens_min:
            return None
        return self._pending.begin(
            job.block_hashes,
            stored_blocks=job.stored_tokens // self._block_tokens,
            now_s=self._clock.monotonic_s(),
            seconds=UNMEASURED_S if seconds is None else seconds,
        )

    def end(self, pending: Pending | None, *, stored: bool) -> None:
        """The rank is done, or lost. Repeating it does nothing."""
        if pending is not None:
            self._pending.end(pending, stored=stored, now_s=self._clock.monotonic_s())

    def _share(self, job: Job) -> Share | None:
        return self._pending.longest(
            job.block_hashes,
            stored_blocks=min(job.stored_tokens // self._block_tokens, len(job.block_hashes)),
            now_s=self._clock.monotonic_s(),
        )

    def _with_stored(self, job: Job, tokens: int) -> Job:
        """The last token is always computed, so it is never a hit. Nothing that was known is forgotten."""
        return replace(job, stored_tokens=max(job.stored_tokens, min(tokens, len(job.prompt_ids) - 1)))

    def _patience_s(self, share: Share, tokens: int) -> float:
        again_s = self._meter.prompt_s(tokens) or 0.0
        left_s = share.pending.expected_s - self._clock.monotonic_s()
        return PATIENCE_FACTOR * max(again_s, left_s) + PATIENCE_EXTRA_S

    async def _wait(self, share: Share, patience: Deadline) -> None:
        """Until the computation ends, or the part that is wanted of it should be there."""
        expected_s = share.pending.expected_at_s(share.depth_blocks) - self._clock.monotonic_s()
        wait = patience.earlier(expected_s) if expected_s > 0 else patience
        try:
            async with asyncio.timeout(wait.remaining_s()):
                await share.pending.ended.wait()
        except TimeoutError:
            return
