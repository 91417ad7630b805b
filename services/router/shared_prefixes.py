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
from .joint_prefixes import JointPrefixes
from .pending_prefixes import Name, Pending, PendingPrefixes, Share
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
        joint: JointPrefixes | None = None,
        clock: Clock,
    ) -> None:
        """`tokens_min`: fewer tokens are not waited for. `stored_blocks` asks the store, with a bound of its own.
        `joint`: what all processes of this router compute; None: there is one."""
        self._block_tokens = block_tokens
        self._tokens_min = tokens_min
        self._meter = meter
        self._stored_blocks = stored_blocks
        self._clock = clock
        self._pending = PendingPrefixes()
        self._joint = joint
        self._told: dict[Pending, Name] = {}
        """What is computed here, as other processes know it."""

    async def settled(self, job: Job) -> tuple[Job, float]:
        """The job with the stored prefix that it will find, and when was last looked for others (monotonic seconds).
        While somebody computes more of its prefix, it waits, at most about as long as computing that again would
        take."""
        patience: Deadline | None = None
        began_s = self._clock.monotonic_s()
        while True:
            share, looked_s = self._share(job)
            if share is None:
                break
            tokens = share.depth_blocks * self._block_tokens
            if share.pending.stored:
                job = self._with_stored(job if share.exact else await self.looked_up(job), tokens)
                break
            if tokens - job.stored_tokens < self._tokens_min:
                break
            patience = patience or job.deadline.earlier(self._patience_s(share, tokens - job.stored_tokens))
            if patience.expired:
                PREFIX_WAITS.labels("given_up").inc()
                return job, looked_s
            await self._wait(share, patience)
            if not share.pending.stored:
                job = await self.looked_up(job)
        if patience is not None:
            PREFIX_WAITS.labels("shared").inc()
            PREFIX_WAIT_SECONDS.observe(self._clock.monotonic_s() - began_s)
        return job, looked_s

    async def looked_up(self, job: Job) -> Job:
        """The job with what the store holds of it now."""
        return self._with_stored(job, await self._stored_blocks(job) * self._block_tokens)

    def begin(self, job: Job, *, seconds: float | None, looked_s: float | None = None) -> Pending | None:
        """A rank is about to compute the rest of the prompt. None: too little for others to wait for.

        Raises PrefixTakenError if another process has begun it since `looked_s`, which `settled` told. None: it has
        not waited for others, and does not.
        """
        if not self._is_worth_waiting(job):
            return None
        stored_blocks = job.stored_tokens // self._block_tokens
        seconds = UNMEASURED_S if seconds is None else seconds
        name: Name | None = None
        if self._joint is not None:
            name = self._joint.begin(
                job.block_hashes,
                stored_blocks=stored_blocks,
                seconds=seconds,
                looked_s=looked_s,
                blocks_min=-(-self._tokens_min // self._block_tokens),
            )
        now_s = self._clock.monotonic_s()
        pending = self._pending.begin(job.block_hashes, stored_blocks=stored_blocks, now_s=now_s, seconds=seconds)
        if name is not None:
            self._told[pending] = name
        return pending

    def end(self, pending: Pending | None, *, stored: bool) -> None:
        """The rank is done, or lost. Repeating it does nothing."""
        if pending is None:
            return
        self._pending.end(pending, stored=stored, now_s=self._clock.monotonic_s())
        name = self._told.pop(pending, None)
        if name is not None and self._joint is not None:
            self._joint.end(name, stored=stored)

    def _is_worth_waiting(self, job: Job) -> bool:
        return len(job.prompt_ids) - job.stored_tokens >= self._tokens_min

    def _share(self, job: Job) -> tuple[Share | None, float]:
        """What is longest, of this process or of all, and when that was."""
        looked_s = self._clock.monotonic_s()
        stored_blocks = min(job.stored_tokens // self._block_tokens, len(job.block_hashes))
        here = self._pending.longest(job.block_hashes, stored_blocks=stored_blocks, now_s=looked_s)
        if self._joint is None or not self._is_worth_waiting(job):
            return here, looked_s
        anywhere, looked_s = self._joint.longest(job.block_hashes, stored_blocks=stored_blocks)
        if here is None or (anywhere is not None and anywhere.depth_blocks > here.depth_blocks):
            return anywhere, looked_s
        return here, looked_s

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
        if share.pending.name is not None and self._joint is not None:
            self._joint.watch(share.pending)
        try:
            async with asyncio.timeout(wait.remaining_s()):
                await share.pending.ended.wait()
        except TimeoutError:
            return
