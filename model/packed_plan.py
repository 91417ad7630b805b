"""The index tensors of a forward that works on packed records where they lie, without gathering them first.

    few rows a sequence (decode)   window records go to the ring, and are attended to there
    more (chunks of a prompt)      they go to a scratch pool, behind the W - 1 records before them, then to the ring

Everything is int32 and one number a row, so forwards of as many rows have the same shapes, whatever they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .caches import Caches
from .config import ModelConfig
from .rows import Ints, Rows, ring_writes, runs

NO_RING = 1 << 30
"""Modulus of a pool that is in the order of positions."""
GROUP_ROWS_MAX = 8
"""Rows of one sequence that share the index keys they read, at most."""
ENTRIES_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a plan is padded to, so that a recorded forward can be replayed with it. Padding is a row at least where
    there are fewer segments than here."""

    rows: int
    segments: int
    tokens: int
    """Longest sequence: a multiple of what a block holds."""
    group_rows: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as index sources see them."""

    segments: Tensor
    """[rows]"""
    visible: Mapping[int, Tensor]
    """By ratio of a KV source: how many entries a row sees [rows]; 0 for padding."""
    groups: Tensor
    """[3, groups] first row, number of rows and segment of the rows that share what they read."""
    group_rows: int
    entries_max: Mapping[int, int]
    """By ratio: at least as many entries as any row sees."""

    @classmethod
    def build(cls, rows: Rows, ratios: list[int], shape: PlanShape | None) -> Self:
        real = np.arange(len(rows.positions)) < rows.count
        counts = rows.ends - rows.starts
        each = int(min(GROUP_ROWS_MAX, counts.max(initial=1))) if shape is None else shape.group_rows
        tokens = int(rows.ends.max(initial=0)) if shape is None else shape.tokens
        pieces = -(-counts // each)
        segment = np.repeat(np.arange(len(counts)), pieces)
        piece = np.arange(len(segment)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        groups = np.stack(
            (rows.offsets[segment] + piece * each, np.minimum(each, counts[segment] - piece * each), segment)
        )
        if shape is not None:
            # A padding row sees nothing, so its group has nothing to read.
            padding = np.tile([[shape.rows - 1], [1], [0]], shape.segments - groups.shape[1])
            groups = np.concatenate((groups, padding), axis=1)
        return cls(
            segments=_tensor(rows.segments),
            visible={ratio: _tensor(np.where(real, (rows.positions + 1) // ratio, 0)) for ratio in ratios},
            groups=_tensor(groups),
            group_rows=each,
            entries_max={ratio: -(-(tokens // ratio) // ENTRIES_MULTIPLE) * ENTRIES_MULTIPLE for ratio in ratios},
        )


@dataclass(frozen=True, slots=True)
class ScratchWindow:
    """A pool beside the ring, for the time of one layer."""

    rows: int
    previous: Tensor
    """Records of the ring before the segments, …"""
    previous_places: Tensor
    """… and where they go in the pool; int64, as those below."""
    kept_places: Tensor
    """Records of the pool that the ring keeps, …"""
    kept_slots: Tensor
    """… and where."""


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """Where a layer's window records go, and where its queries find them."""

    bases: Tensor
    """[queries] the record of position p is at bases + p mod ring."""
    positions: Tensor
    """[queries]"""
    lowest: Tensor
    """[queries] position below which no record is seen."""
    writes: Tensor
    """[writers] where their records go; -1: nowhere."""
    ring: int
    scratch: ScratchWindow | None
    """None: the pool is the ring itself."""

    @classmethod
    def build(
        cls, queries: Rows, writers: Rows, lows: Ints, slots: Ints, *, window: int, ring_rows: int, in_ring: bool
    ) -> Self:
        """`lows`: position below which a segment's records are not read."""
        before, real = window - 1, np.arange(len(writers.positions)) < writers.count
        if in_ring:
            bases, ring, scratch = slots * ring_rows, ring_rows, None
            writes = bases[writers.segments] + writers.positions % ring_rows
        else:
            lengths = before + writers.ends - writers.starts
            firsts = np.cumsum(lengths) - lengths
            bases, ring = firsts - (writers.starts - before), NO_RING
            writes = bases[writers.segments] + writers.positions
            previous = writers.starts[:, None] + np.arange(-before, 0)
            kept, kept_slots = ring_writes(writers, slots, ring_rows)
            scratch = ScratchWindow(
                rows=int(lengths.sum()),
                previous=torch.from_numpy((slots[:, None] * ring_rows + previous % ring_rows).flatten()),
                previous_places=torch.from_numpy((firsts[:, None] + np.arange(before)).flatten()),
                kept_places=torch.from_numpy(writes[kept]),
                kept_slots=torch.from_numpy(kept_slots),
            )
        return cls(
            bases=_tensor(bases[queries.segments]),
            positions=_tensor(queries.positions),
            lowest=_tensor(lows[queries.segments]),
            writes=_tensor(np.where(real, writes, -1)),
            ring=ring,
            scratch=scratch,
        )


@dataclass(frozen=True, slots=True)
class PackedEntries:
    """The groups of one ratio that the rows of a forward are in, as `EntryRows` takes them. Of groups of one row there
    are as many as rows, with padding."""

    members: Tensor | None
    """[groups, ratio] None with groups of one row, as `keeps` is."""
    keeps: Tensor | None
    """[groups, ratio]"""
    positions: Tensor
    """[groups] int64: position of the group's first row."""
    destinations: Tensor
    """[groups] where the entry goes; -1: the group does not end here, or its entry is there already."""

    @classmethod
    def build(
        cls,
        rows: Rows,
        tables: Ints,
        write_starts: Ints,
        slots: Ints,
        *,
        ratio: int,
        block_tokens: int,
        ring_rows: int,
        shape: PlanShape | None,
    ) -> Self:
        members = keeps = None
        if ratio == 1:
            segments, numbers, count = rows.segments, rows.positions, rows.count
        else:
            first = rows.starts // ratio
            segments, numbers = runs(first, np.where(rows.ends > rows.starts, -(-rows.ends // ratio), first))
            count = len(numbers)
            padding = 0 if shape is None else _groups_max(shape, ratio) - count
            segments, numbers = np.pad(segments, (0, padding)), np.pad(numbers, (0, padding))
            members, keeps = _members(rows, slots, segments, numbers, ratio=ratio, ring_rows=ring_rows)
            members[count:], keeps[count:] = 0, -1
        complete = (np.arange(len(numbers)) < count) & ((numbers + 1) * ratio <= rows.ends[segments])
        per_block = block_tokens // ratio
        written = complete & (numbers >= write_starts[segments] // ratio)
        places = tables[segments, numbers // per_block] * per_block + numbers % per_block
        return cls(
            members=None if members is None else _tensor(members),
            keeps=None if keeps is None else _tensor(keeps),
            positions=torch.from_numpy(numbers * ratio),
            destinations=_tensor(np.where(written, places, -1)),
        )


def _groups_max(shape: PlanShape, ratio: int) -> int:
    """How many groups the rows of a forward of this shape can be in: n rows of a segment in (n - 2) / ratio + 2."""
    return min(shape.rows, (shape.rows - 2 * shape.segments) // ratio + 2 * shape.segments)


def _members(
    rows: Rows, slots: Ints, segments: Ints, numbers: Ints, *, ratio: int, ring_rows: int
) -> tuple[Ints, Ints]:
    """Of each group [groups, ratio], where its rows are and which place of the ring they are kept at, or for those in
    the ring already, which row of this forward takes their place (`EntryRows`)."""
    starts, ends = rows.starts[segments, None], rows.ends[segments, None]
    tokens = numbers[:, None] * ratio + np.arange(ratio)
    offsets = rows.offsets[segments, None] - starts
    places = slots[segments, None] * ring_rows + tokens % ring_rows
    own, before = (tokens >= starts) & (tokens < ends), tokens < starts
    members = np.where(own, offsets + tokens, np.where(before, -1 - places, 0))
    # The first group's rows in the ring are read by its program alone, which then lets others take their places.
    group_starts = starts // ratio * ratio
    elsewhere = (tokens - group_starts) % ring_rows < starts - group_starts
    keeps = np.where(own & (tokens >= ends - ring_rows) & ~elsewhere, places, -1)
    latest = tokens + (ends - 1 - tokens) // ring_rows * ring_rows
    return members, np.where(before & (latest >= starts), offsets + latest, keeps)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    every: PackedRows
    kept: PackedRows
    lower_window: PackedWindow
    """The three windows as in `GatherPlan`."""
    source_window: PackedWindow
    upper_window: PackedWindow
    entries: Mapping[int, PackedEntries]
    """By ratio of a KV source."""
    tables: Tensor
    """[segments, blocks]"""

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
        shape: PlanShape | None = None,
    ) -> Self:
        ratios = sorted({config.ratio(source) for source in config.kv_source_layer_ids})
        trimmed = bool((kept.starts > every.starts).any())
        rows_max = int((every.ends - every.starts).max(initial=0))
        sizes: dict[str, Any] = {
            "window": config.window,
            "ring_rows": caches.ring_rows,
            # The last row's record must not take the place of one that the first row sees.
            "in_ring": config.window + rows_max - 1 <= caches.ring_rows,
        }
        lower = PackedWindow.build(every, every, window_starts, slots, **sizes)
        all_rows = PackedRows.build(every, ratios, shape)
        return cls(
            every=all_rows,
            kept=PackedRows.build(kept, ratios, shape) if trimmed else all_rows,
            lower_window=lower,
            source_window=PackedWindow.build(kept, every, window_starts, slots, **sizes) if trimmed else lower,
            upper_window=PackedWindow.build(kept, kept, np.maximum(floors, window_starts), slots, **sizes),
            entries={
                ratio: PackedEntries.build(
                    every,
                    tables,
                    write_starts,
                    slots,
                    ratio=ratio,
                    block_tokens=caches.block_tokens,
                    ring_rows=caches.group_ring_rows,
                    shape=shape,
                )
                for ratio in ratios
            },
            tables=_tensor(tables),
        )


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
