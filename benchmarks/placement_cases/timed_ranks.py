"""Ranks that take the time that real ones would, and a store that they share. All on virtual time.

A prefill rank runs one prompt after another in chunks, and stores the blocks of a chunk when it ends. A decode rank
steps: a step is longer the more requests run, and longer while rows of prompts are computed beside them. As all
requests of a batch step together, the count of steps is its clock: a request ends when the count has grown by its
output.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Clock
from whalepod.engine.interface import RankLoad

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds. Of a rank of eight large accelerators with a model of this size, roughly."""

    prompt_s: float = 0.02
    """Fixed cost of a prompt on a prefill rank."""
    prompt_row_s: float = 1 / 20_000
    chunk_tokens: int = 8192
    fetch_token_s: float = 890 / 4e9
    """A stored token of 890 bytes."""
    handoff_s: float = 0.03
    step_s: float = 0.018
    step_request_s: float = 0.0003
    local_rows: int = 256
    """Prompt rows beside a decode step."""
    local_step_s: float = 256 / 12_000
    """What they add to it."""


@dataclass(slots=True)
class Store:
    """Every block that anybody has computed: nothing is evicted."""

    blocks: set[BlockHash] = field(default_factory=set)

    def leading(self, chain: Sequence[BlockHash]) -> int:
        return next((index for index, block in enumerate(chain) if block not in self.blocks), len(chain))


class PrefillRank:
    def __init__(self, store: Store, speeds: Speeds) -> None:
        self._store = store
        self._speeds = speeds
        self._turn = asyncio.Lock()
        self.queued_tokens = 0
        self.requests = 0
        self.busy_s = 0.0
        self.served = 0

    @property
    def load(self) -> RankLoad:
        return RankLoad(
            running=min(1, self.requests),
            waiting=max(0, self.requests - 1),
            prefill_tokens_queued=self.queued_tokens,
            slots_total=16,
        )

    async def run(self, chain: Sequence[BlockHash], tokens: int) -> int:
        """Compute what is not stored when its turn comes. Returns the tokens that were stored."""
        guess = tokens - self._store.leading(chain) * BLOCK_TOKENS
        self.queued_tokens += guess
        self.requests += 1
        self.served += 1
        try:
            async with self._turn:
                hit = min(self._store.leading(chain) * BLOCK_TOKENS, tokens - 1)
                await self._spend(self._speeds.prompt_s + hit * self._speeds.fetch_token_s)
                for start in range(hit, tokens, self._speeds.chunk_tokens):
                    end = min(tokens, start + self._speeds.chunk_tokens)
                    await self._spend((end - start) * self._speeds.prompt_row_s)
                    self._store.blocks.update(chain[: end // BLOCK_TOKENS])
                return hit
        finally:
            self.queued_tokens -= guess
            self.requests -= 1

    async def _spend(self, seconds: float) -> None:
        self.busy_s += seconds
        await asyncio.sleep(seconds)


class DecodeRank:
    def __init__(self, store: Store, speeds: Speeds, *, slots: int, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._speeds = speeds
        self._slots = slots
        self._free = asyncio.Semaphore(slots)
        self._steps = 0.0
        self._at_s = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0
        self._prompts: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.requests = 0
        self.queued_tokens = 0
        self.busy_s = 0.0
        self.served = 0

    @property
    def load(self) -> RankLoad:
        return RankLoad(
            running=min(self._slots, self.requests),
            waiting=max(0, self.requests - self._slots),
            prefill_tokens_queued=self.queued_tokens,
            slots_total=self._slots,
            blocks_free=1,
            blocks_total=1,
        )

    async def compute(self, chain: Sequence[BlockHash], tokens: int) -> int:
        """A prompt's rows, beside the steps of the others. Returns the tokens that were stored."""
        hit = min(self._store.leading(chain) * BLOCK_TOKENS, tokens - 1)
        await asyncio.sleep(hit * self._speeds.fetch_token_s)
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued_tokens += tokens - hit
        self._prompts.append(((tokens - hit) / self._speeds.local_rows, done))
        if len(self._prompts) == 1:
            self._begin_prompt()
        self._plan()
        await done
        self.queued_tokens -= tokens - hit
        self._store.blocks.update(chain)
        return hit

    async def generate(self, tokens: int) -> None:
        """So many tokens, one a step."""
        async with self._free:
            self._advance()
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._ends, (self._steps + tokens, self._count, done))
            self._plan()
            await done

    @property
    def _step_s(self) -> float:
        local = self._speeds.local_step_s if self._prompts else 0.0
        return self._speeds.step_s + len(self._ends) * self._speeds.step_request_s + local

    def _begin_prompt(self) -> None:
        steps, done = self._prompts[0]
        self._prompts[0] = (self._steps + steps, done)

    def _advance(self) -> None:
        """Steps since the last change, at the pace since then."""
        now_s = self._clock.monotonic_s()
        if self._ends or self._prompts:
            self._steps += (now_s - self._at_s) / self._step_s
            self.busy_s += now_s - self._at_s
        self._at_s = now_s

    def _plan(self) -> None:
        """Wake up at the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        targets = [heap[0][0] for heap in (self._ends, self._prompts) if heap]
        if targets:
            seconds = max(0.0, min(targets) - self._steps) * self._step_s
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            heapq.heappop(self._ends)[2].set_result(None)
        while self._prompts and self._prompts[0][0] <= self._steps + 1e-6:
            self._prompts.popleft()[1].set_result(None)
            if self._prompts:
                self._begin_prompt()
        self._plan()
