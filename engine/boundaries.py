"""Positions at which state may be stored, restored and handed over (`design.md` §4). Arithmetic only.

L is a prompt's length, B a block's tokens, W the window, K the kept rows, R0 the tokens after which no group is
unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whalepod.core.errors import ConfigError
from whalepod.model.config import ModelConfig

from .interface import SnapshotKind


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Of one model at one block size. Raises ConfigError if B is no multiple of R0."""

    config: ModelConfig
    block_tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.block_tokens % self.config.group_tokens:
            raise ConfigError(
                f"block_tokens must be a multiple of {self.config.group_tokens} for this model, not {self.block_tokens}"
            )

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def hit(self, *, stored_tokens: int, prompt_tokens: int) -> int:
        """R = B · ⌊min(stored, L - K) / B⌋: where a prompt resumes after a prefix of `stored_tokens`."""
        room = max(0, min(stored_tokens, prompt_tokens - self.config.kept_rows))
        return room - room % self.block_tokens

    def lost_to_rounding(self, prompt_tokens: int) -> int:
        """(L - K) mod B: rows that the longest hit computes because it ends with a block."""
        return max(0, prompt_tokens - self.config.kept_rows) % self.block_tokens

    def replay_start(self, *, boundary: int, prompt_tokens: int, exact: bool) -> int:
        """First row to replay so that windows are there at `boundary`: W rows before it, or the whole halo."""
        if exact:
            floor = self.config.floor(prompt_tokens)
            return boundary - self.config.halo_rows(boundary=boundary, floor=floor)
        return max(0, boundary - self.config.window)

    def window_start(self, boundary: int) -> int:
        """First of the W - 1 window rows that a row at `boundary` sees."""
        return max(0, boundary - self.config.window + 1)

    def windows_exact_from(self, replay_start: int) -> int:
        """Position from which window rows of all layers up to the last KV source are exact, after a replay from there.

        The halo of one request reaches as far as its own L needs; a snapshot for others needs all W - 1 rows of every
        layer.
        """
        return replay_start and replay_start + self.config.last_kv_source * (self.config.window - 1)

    def encoder_handoff(self, prompt_tokens: int) -> int:
        """Largest n <= L - K that R0 divides: where a rank without the upper layers hands over. 0: nothing to hand
        over."""
        floor = self.config.floor(prompt_tokens)
        return floor - floor % self.config.group_tokens

    def may_hand_over(self, kind: SnapshotKind, boundary: int, *, prompt_tokens: int) -> bool:
        """Whether a snapshot of this kind at this boundary holds all that a prompt of L tokens goes on from."""
        if kind is SnapshotKind.FULL:
            return boundary >= prompt_tokens
        return boundary <= self.config.floor(prompt_tokens) and boundary % self.config.group_tokens == 0

    def crash_borders(self, *, prompt_tokens: int, tokens: int, every: int) -> Iterator[int]:
        """Block borders up to `tokens` at which a request leaves what another rank may go on from, the newest first:
        after each `every` tokens of output the next one."""
        for spans in range((tokens - prompt_tokens) // every, 0, -1):
            border = self.blocks(prompt_tokens + spans * every) * self.block_tokens
            following = self.blocks(prompt_tokens + (spans + 1) * every) * self.block_tokens
            if border <= tokens and border != following:
                yield border

    def turn_borders(self, prompt_tokens: int) -> tuple[int, ...]:
        """The last 1 + ⌈K / B⌉ block borders of a prompt, ascending: a next turn that is only a little longer resumes
        at one."""
        last = prompt_tokens // self.block_tokens
        first = max(1, last - self.blocks(self.config.kept_rows))
        return tuple(self.block_tokens * border for border in range(first, last + 1))
