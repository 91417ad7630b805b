"""One segment over several ranks, each with an equal part of the causal work (balanced context parallelism).

    rows of the segment ─ zig-zag ─▶ chunk i and chunk 2C-1-i for rank i
    a rank's own rows ─▶ projections, attention, experts      all ranks' window records and raw entries ─▶ its caches

Layers below the last KV source compute own rows only; what those leave in the caches is gathered from all, so that
every rank's caches hold what they would without the others, to the bit. The few kept rows above that layer are computed
by every rank; if all rows are kept, they stay divided to the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .batch import Segment
from .batch_plan import BatchPlan, EntryPlan, GatherPlan, WindowPlan
from .caches import Caches
from .config import ModelConfig
from .rows import Ints, Rows, pad

CHUNK_MULTIPLE = 2
"""Pairs of tokens never straddle ranks."""


class RowExchange(Protocol):
    """Takes part in every gather of its group, in the same order as the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [counts[rank], …] of this rank -> [Σ counts, …], rank by rank."""
        ...


def zigzag(rows: int, ranks: int) -> list[list[range]]:
    """Which rows, from 0, each rank computes: two chunks, whose mean place is the middle, for any `rows`.

    Empty if there are too few rows to divide: every rank computes them then.
    """
    if rows < 2 * ranks * CHUNK_MULTIPLE or ranks == 1:
        return []
    size = -(-rows // (2 * ranks))
    size += -size % CHUNK_MULTIPLE
    chunks = [range(min(rows, n * size), min(rows, (n + 1) * size)) for n in range(2 * ranks)]
    return [[chunks[rank], chunks[2 * ranks - 1 - rank]] for rank in range(ranks)]


def owner_of(row: int, rows: int, ranks: int) -> int:
    """The rank that computes a row, of those that `zigzag` divides."""
    chunks = enumerate(zigzag(rows, ranks))
    return next((rank for rank, both in chunks if any(row in chunk for chunk in both)), 0)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """How the rows of one segment are divided, and the way to those of the others."""

    exchange: RowExchange
    positions: tuple[Ints, ...]
    """Of each rank's rows, ascending."""

    @classmethod
    def divide(cls, segment: Segment, exchange: RowExchange) -> SharedRows | None:
        """None: there are too few rows."""
        parts = zigzag(len(segment.token_ids), exchange.size)
        if not parts:
            return None
        positions = tuple(
            segment.start + np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks]) for chunks in parts
        )
        return cls(exchange, positions)

    @property
    def own(self) -> Ints:
        return self.positions[self.exchange.rank]

    def all_rows(self, rows: Tensor, *, low: int = 0) -> Tensor:
        """rows [own rows or more, …] -> those of all ranks at positions >= `low`, in the order of positions."""
        counts = [int((positions >= low).sum()) for positions in self.positions]
        own = torch.from_numpy(self.own >= low).to(rows.device)
        gathered = self.exchange.gather_rows(rows[: len(own)][own], counts)
        places = np.concatenate([positions[positions >= low] for positions in self.positions])
        return gathered[torch.from_numpy(np.argsort(places)).to(rows.device)]

    def own_segments(self, segment: Segment, look_back: int) -> list[Segment]:
        """This rank's chunks, each with the tokens before it."""
        tokens = [*segment.history, *segment.token_ids]
        base = segment.start - len(segment.history)
        breaks = np.flatnonzero(np.diff(self.own) != 1) + 1
        chunks = [chunk for chunk in np.split(self.own, breaks) if len(chunk)]
        return [
            segment._replace(
                start=int(chunk[0]),
                token_ids=tuple(tokens[int(chunk[0]) - base : int(chunk[-1]) + 1 - base]),
                history=tuple(tokens[max(0, int(chunk[0]) - base - look_back) : int(chunk[0]) - base]),
            )
            for chunk in chunks
        ]


def plan_shared(segment: Segment, shared: SharedRows, config: ModelConfig, caches: Caches) -> BatchPlan:
    """The plan of this rank's part, on the host's device. Gathered records only: packed kernels run alone."""
    start, end = np.array([segment.start]), np.array([segment.end])
    whole = Rows.between(start, end)
    own_positions = pad(shared.own)
    own = Rows(start, end, len(shared.own), np.array([0]), np.zeros_like(own_positions), own_positions)
    floor = np.clip(np.array([segment.floor]), start, end)
    trimmed = bool(floor[0] > start[0])
    kept = Rows.between(floor, end) if trimmed else own
    slots, lows = np.array([segment.slot]), np.array([segment.window_start])
    tables = np.array([segment.block_table], dtype=np.int64)
    sizes = {"window": config.window, "ring_rows": caches.ring_rows}
    lower = WindowPlan.build(own, whole, lows, slots, **sizes)
    upper_lows = np.maximum(np.array([segment.floor]), lows)
    logits_start = segment.end if segment.logits_start is None else segment.logits_start
    final = kept if trimmed else whole
    asked = np.flatnonzero((final.positions >= logits_start)[: final.count])
    ids = dict(zip(range(segment.start, segment.end), segment.token_ids, strict=True))
    return BatchPlan(
        every=own,
        kept=kept,
        kept_index=torch.arange(len(kept.positions)) if trimmed else None,
        token_ids=torch.tensor([ids[int(position)] for position in own_positions]),
        positions=torch.from_numpy(own_positions),
        kept_positions=torch.from_numpy(kept.positions),
        logit_rows=torch.from_numpy(asked),
        records=GatherPlan(
            tables=torch.from_numpy(tables),
            lower_window=lower,
            source_window=WindowPlan.build(kept, whole, lows, slots, **sizes) if trimmed else lower,
            upper_window=WindowPlan.build(kept, kept if trimmed else whole, upper_lows, slots, **sizes),
            entries={
                ratio: EntryPlan.build(
                    whole,
                    tables,
                    np.array([segment.write_start]),
                    slots,
                    ratio=ratio,
                    block_tokens=caches.block_tokens,
                    ring_rows=caches.group_ring_rows,
                )
                for ratio in {config.ratio(source) for source in config.kv_source_layer_ids}
            },
        ),
    )
