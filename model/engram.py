"""N-gram memory: which rows of a table a token's n-grams name, and how they enter the residual streams.

    token ids ─ look_back, compress ─▶ last n ids ─ hash_rows ─▶ table rows ─ EngramTable ─▶ memory ─ Engram ─▶ streams

Rows depend on token ids only, so they are known before the first layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.engram_gate import let_in

from .engram_layout import EngramLayout
from .projection import Projection

DEAD = -1
"""Stands for a token that no n-gram reaches across: before the sequence's start, or part of an image."""


def look_back(token_ids: Sequence[int], history: Sequence[int], *, tokens: int) -> Tensor:
    """Ids of each token and its predecessors, newest first: [len(token_ids), tokens] int64, DEAD before the start.

    `history` holds the tokens before, oldest first, `tokens - 1` of them unless the sequence begins among them.
    """
    before = list(history[-(tokens - 1) :]) if tokens > 1 else []
    ids = torch.tensor([DEAD] * (tokens - 1 - len(before)) + before + list(token_ids), dtype=torch.int64)
    return ids.unfold(0, tokens, 1).flip(-1)


def compress(ids: Tensor, token_map: Tensor, *, image_token_id: int | None) -> Tensor:
    """Token ids [...] -> compressed ids, DEAD where a token is dead or part of an image."""
    dead = ids < 0
    if image_token_id is not None:
        dead = dead | (ids == image_token_id)
    return token_map[ids.clamp(min=0)].to(torch.int64).masked_fill(dead, DEAD)


def hash_rows(compressed: Tensor, layout: EngramLayout, *, pad_id: int) -> Tensor:
    """compressed [rows, tokens], newest first -> table rows [rows, columns] int64, columns by n-gram size, then head.

    A dead token and everything before it count as `pad_id`. Products are below 2^63, so the hash, an exclusive or of
    products, is not negative.
    """
    dead = (compressed == DEAD).cumsum(dim=1) > 0
    products = compressed.masked_fill(dead, pad_id) * _int64(layout.multipliers, compressed)
    hashes: list[Tensor] = []
    mixed = products[:, 0]
    for token in range(1, products.shape[1]):
        mixed = mixed ^ products[:, token]
        hashes.append(mixed)
    heads = len(layout.primes) // len(hashes)
    columns = torch.stack(hashes, dim=1).repeat_interleave(heads, dim=1)
    return columns % _int64(layout.primes, compressed) + _int64(layout.offsets, compressed)


def _int64(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


@dataclass(frozen=True, slots=True)
class Engram:
    """One n-gram layer's weights."""

    projection: Projection
    """[(S + 1) · D, columns · width]: S keys, then one value."""
    gate_weight: Tensor
    """[S, D]: query weight · key weight, at least float32."""
    eps: float

    def __call__(self, streams: Tensor, memory: Tensor, text: Tensor | None) -> Tensor:
        """streams [rows, S, D], memory [rows, columns · width] -> streams with what the gates let in.

        `text` [rows] bool marks rows that are no part of an image; None: all. Others stay as they are.
        """
        return let_in(streams, self.projection(memory), self.gate_weight, text, eps=self.eps)
