"""Turns the segments of a forward into the index tensors that its layers share.

Everything here follows from positions: which rows run where, which window rows and entries a row may see, and where
rows are read and written in the caches. Nothing depends on activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from .batch import Segment
from .caches import Caches
from .config import ModelConfig
from .packed_plan import PackedPlan, PlanShape
from .plan_transfer import on_device
from .rows import Ints, Rows, pad, ring_writes, runs

Indices = TypeVar("Indices", Ints, Tensor)


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Window keys of a layer's queries, and where its own rows go.

    Keys come from a pool of rows: a zero row, the W - 1 rows in the ring before each segment, the rows of this forward.
    """

    previous: Tensor
    """[segments · (W - 1)] rows of the ring, flat over slots."""
    index: Tensor
    """[queries, W] rows of the pool, by ascending position; 0 where a query sees no row."""
    write_rows: Tensor
    """The rows of this forward that the ring keeps."""
    write_slots: Tensor
    """Where, flat over slots."""

    @classmethod
    def build(cls, queries: Rows, writers: Rows, lows: Ints, slots: Ints, *, window: int, ring_rows: int) -> Self:
        """`lows`: position below which a segment's rows are not read."""
        before = window - 1
        segments, own = queries.segments, writers.starts
        keys = queries.positions[:, None] + np.arange(-before, 1)
        previous_base = 1 + np.arange(len(own)) * before - (own - before)
        own_base = 1 + len(own) * before + writers.offsets - own
        index = keys + np.where(keys >= own[segments, None], own_base[segments, None], previous_base[segments, None])
        index[keys < lows[segments, None]] = 0
        previous = own[:, None] + np.arange(-before, 0)
        kept, write_slots = ring_writes(writers, slots, ring_rows)
        return cls(
            previous=_tensor(slots[:, None] * ring_rows + previous % ring_rows).flatten(),
            index=_tensor(index),
            write_rows=_tensor(kept),
            write_slots=_tensor(write_slots),
        )


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """The entries that this forward finishes, for sources of one ratio.

    Their tokens come from a pool of raw rows: the ratio - 1 rows in the ring before each segment, the rows of this
    forward. With ratio 1 there is no ring: a row is an entry.
    """

    members: Tensor
    """[entries, ratio] rows of the pool."""
    positions: Tensor
    """[entries] position of an entry's first token: where it is rotated."""
    destinations: Tensor
    """[entries] rows of the source's pools, flat over blocks."""
    previous: Tensor
    """[segments · (ratio - 1)] rows of the group ring, flat over slots."""
    write_rows: Tensor
    write_slots: Tensor
    """As in `WindowPlan`, for the group ring."""

    @classmethod
    def build(
        cls, rows: Rows, tables: Ints, write_starts: Ints, slots: Ints, *, ratio: int, block_tokens: int, ring_rows: int
    ) -> Self:
        """An entry is written if its last token is among `rows` and not below its segment's `write_starts`."""
        before, per_block = ratio - 1, block_tokens // ratio
        first = np.maximum(rows.starts // ratio, write_starts // ratio)
        segments, numbers = runs(first, np.maximum(rows.ends // ratio, first))
        tokens = numbers[:, None] * ratio + np.arange(ratio)
        previous_base = np.arange(len(rows.starts)) * before - (rows.starts - before)
        own_base = len(rows.starts) * before + rows.offsets - rows.starts
        own = tokens >= rows.starts[segments, None]
        previous = rows.starts[:, None] + np.arange(-before, 0)
        kept, write_slots = ring_writes(rows, slots, ring_rows)
        return cls(
            members=_tensor(tokens + np.where(own, own_base[segments, None], previous_base[segments, None])),
            positions=_tensor(numbers * ratio),
            destinations=_tensor(pool_rows(tables[segments, numbers // per_block], numbers, per_block)),
            previous=_tensor(slots[:, None] * ring_rows + previous % ring_rows).flatten(),
            write_rows=_tensor(kept),
            write_slots=_tensor(write_slots),
        )


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Of a forward that gathers and decodes the records it looks at: the reference's way."""

    tables: Tensor
    """[segments, blocks] int64, short tables padded with 0."""
    lower_window: WindowPlan
    """Layers below the last KV source."""
    source_window: WindowPlan
    """The last KV source: every row is written, kept rows look, and see their full window."""
    upper_window: WindowPlan
    """Layers above it: kept rows only."""
    entries: dict[int, EntryPlan]
    """By ratio of a KV source."""

    @classmethod
    def build(
        cls,
        every: Rows,
        kept: Rows,
        *,
        floors: Ints,
        window_starts: Ints,
        write_starts: Ints,
        slots: Ints,
        tables: Ints,
        config: ModelConfig,
        caches: Caches,
    ) -> Self:
        sizes = {"window": config.window, "ring_rows": caches.ring_rows}
        trimmed = bool((kept.starts > every.starts).any())
        lower = WindowPlan.build(every, every, window_starts, slots, **sizes)
        return cls(
            tables=_tensor(tables),
            lower_window=lower,
            source_window=WindowPlan.build(kept, every, window_starts, slots, **sizes) if trimmed else lower,
            upper_window=WindowPlan.build(kept, kept, np.maximum(floors, window_starts), slots, **sizes),
            entries={
                ratio: EntryPlan.build(
                    every,
                    tables,
                    write_starts,
                    slots,
                    ratio=ratio,
                    block_tokens=caches.block_tokens,
                    ring_rows=caches.group_ring_rows,
                )
                for ratio in {config.ratio(source) for source in config.kv_source_layer_ids}
            },
        )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One forward. Rows at and above `floor` are *kept*: they alone run above the last KV source."""

    every: Rows
    kept: Rows
    kept_index: Tensor | None
    """[padded kept rows] which of all rows they are; None: all."""
    token_ids: Tensor
    """[padded rows] int64, of all rows."""
    positions: Tensor
    """[padded rows] int64, of all rows."""
    kept_positions: Tensor
    logit_rows: Tensor
    """Which of the kept rows need logits."""
    records: GatherPlan | PackedPlan
    """Where records are written and read: gathered and decoded, or packed where they lie."""

    @classmethod
    def build(cls, segments: Sequence[Segment], config: ModelConfig, caches: Caches, *, packed: bool = False) -> Self:
        """On the device of the caches."""
        return on_device(cls.on_host(segments, config, caches, packed=packed), caches.device)

    @classmethod
    def on_host(
        cls,
        segments: Sequence[Segment],
        config: ModelConfig,
        caches: Caches,
        *,
        packed: bool,
        shape: PlanShape | None = None,
    ) -> Self:
        """On the CPU, where a packed one may be padded to `shape`: all of its rows are kept and give logits then."""
        assert packed or shape is None, "only packed plans have shapes that do not depend on what they compute"
        padded = None if shape is None else shape.rows
        starts, ends = _ints(s.start for s in segments), _ints(s.end for s in segments)
        floors = _ints(s.floor for s in segments)
        every = Rows.between(starts, ends, padded=padded)
        kept = Rows.between(np.clip(floors, starts, ends), ends, padded=padded)
        trimmed = bool((kept.starts > starts).any())
        logit_starts = _ints(s.end if s.logits_start is None else s.logits_start for s in segments)
        asked = np.flatnonzero((kept.positions >= logit_starts[kept.segments])[: kept.count])
        places: dict[str, Any] = {
            "floors": floors,
            "window_starts": _ints(s.window_start for s in segments),
            "write_starts": _ints(s.write_start for s in segments),
            "slots": _ints(s.slot for s in segments),
            "tables": _tables(segments, caches.block_tokens, shape),
            "config": config,
            "caches": caches,
        }
        return cls(
            every=every,
            kept=kept,
            kept_index=_tensor(every.offsets[kept.segments] + kept.positions - starts[kept.segments])
            if trimmed
            else None,
            token_ids=_tensor(pad(_ints(token for s in segments for token in s.token_ids), padded)),
            positions=_tensor(every.positions),
            kept_positions=_tensor(kept.positions),
            logit_rows=_tensor(asked if shape is None else np.arange(shape.rows)),
            records=PackedPlan.build(every, kept, shape=shape, **places)
            if packed
            else GatherPlan.build(every, kept, **places),
        )

    @property
    def gather(self) -> GatherPlan:
        assert isinstance(self.records, GatherPlan)
        return self.records

    @property
    def packed(self) -> PackedPlan | None:
        return self.records if isinstance(self.records, PackedPlan) else None

    def kept_rows(self, segment: int, start: int, count: int) -> Tensor:
        """Which of the kept rows are those of positions `start` … `start + count - 1` of a segment, by its place."""
        first = int(self.kept.offsets[segment] + start - self.kept.starts[segment])
        return torch.arange(first, first + count, device=self.kept_positions.device)


def pool_rows(blocks: Indices, entries: Indices, entries_per_block: int) -> Indices:
    """Rows of a source's pools, flat over blocks, of `entries` that lie in `blocks`."""
    return blocks * entries_per_block + entries % entries_per_block


def _tables(segments: Sequence[Segment], block_tokens: int, shape: PlanShape | None) -> Ints:
    longest = max((len(s.block_table) for s in segments), default=0)
    size = (len(segments), longest) if shape is None else (shape.segments, shape.tokens // block_tokens)
    tables = np.zeros(size, dtype=np.int64)
    for row, segment in zip(tables, segments, strict=False):
        blocks = len(segment.block_table)
        assert blocks * block_tokens >= segment.end, f"{blocks} blocks do not hold {segment.end} positions"
        row[: min(blocks, len(row))] = segment.block_table[: len(row)]
    return tables


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
