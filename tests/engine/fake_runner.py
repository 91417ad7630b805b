"""Stands in for the network: a row's logits are a function of all tokens up to it, read back from block memory.

Whoever writes to a block that is not his, or reads one that was given away, gets other logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from whalepod.engine.device import LaunchedRows
from whalepod.model.batch import Segment
from whalepod.model.draft import Anchor, Chooser, Drafts

TABLE_ROWS = 64


class FakeRunner:
    """Counts what it computes. `fails`: raises for every step that holds a row of these requests."""

    def __init__(
        self, *, block_tokens: int, vocab_size: int, eos_id: int, fails: frozenset[bytes] = frozenset()
    ) -> None:
        self._block_tokens = block_tokens
        self._memory: dict[int, NDArray[np.int64]] = {}
        self._tables: dict[int, tuple[int, ...]] = {}
        self._table = np.random.Generator(np.random.PCG64(5)).normal(0, 2, (TABLE_ROWS, vocab_size)).astype(np.float32)
        self._table[:4, eos_id] = 12  # an answer may end at any token
        self._fails = fails
        self.steps = 0
        self.decode_rows = 0

    def run(self, rows: Sequence[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        if any(row.sequence.request.request_id in self._fails for row in rows):
            raise RuntimeError("a kernel failed")
        self.steps += 1
        return [self._logits(row.segment) for row in rows]

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        """Knows what follows two times in three."""
        known = [[*self._tokens(self._tables[anchor.slot], anchor.position), anchor.token_id] for anchor in anchors]
        ids: list[torch.Tensor] = []
        odds: list[list[float]] = []
        for number in range(tokens):
            sums = [zlib.crc32(np.array(text, np.int64).tobytes()) for text in known]
            rows = [self._table[(code if code % 3 else code + 1) % TABLE_ROWS] for code in sums]
            ids.append(choose(number, torch.from_numpy(np.stack(rows))))
            odds.append([2.0 if code % 3 else -2.0 for code in sums])
            for text, chosen in zip(known, ids[-1].tolist(), strict=True):
                text.append(chosen)
        drafted = torch.stack(ids, dim=1)
        return Drafts(drafted, torch.zeros(*drafted.shape, 0), torch.tensor(odds).T)

    def _logits(self, segment: Segment) -> NDArray[np.float32] | None:
        assert min(segment.token_ids) >= 0, "a row without a token"
        self._tables[segment.slot] = tuple(segment.block_table)
        for position, token_id in enumerate(segment.token_ids, segment.start):
            if position >= segment.write_start:
                block = segment.block_table[position // self._block_tokens]
                row = self._memory.setdefault(block, np.full(self._block_tokens, -1, np.int64))
                row[position % self._block_tokens] = token_id
        if segment.logits_start is None:
            return None
        self.decode_rows += len(segment.token_ids) == 1
        tokens = self._tokens(segment.block_table, segment.end)
        return np.stack([self._after(tokens[: end + 1]) for end in range(segment.logits_start, segment.end)])

    def _tokens(self, table: Sequence[int], count: int) -> NDArray[np.int64]:
        """The first ones of a sequence, read back."""
        blocks = table[: -(-count // self._block_tokens)]
        return np.concatenate([self._memory[block] for block in blocks])[:count]

    def logits_after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the row of the last of these tokens gives."""
        return self._after(np.array(tokens, np.int64))

    def _after(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._table[zlib.crc32(tokens.tobytes()) % TABLE_ROWS]
        return row
