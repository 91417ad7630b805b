"""Which rows a layer computes: some consecutive ones of each segment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from whalepod.kernels.numerics import batch_rows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of each segment, one segment after the other, as layers compute them.

    They are padded as the kernels like it best (`batch_rows`) by repeating the last row, whose copies compute what it
    computes and are never written to a cache.
    """

    starts: Ints
    """Position of each segment's first row."""
    ends: Ints
    """Position after its last row; not below `starts`."""
    count: int
    """Rows without padding."""
    offsets: Ints
    """Number of rows before each segment's."""
    segments: Ints
    """[padded rows] segment of each row."""
    positions: Ints
    """[padded rows]"""

    @classmethod
    def between(cls, starts: Ints, ends: Ints, *, padded: int | None = None) -> Self:
        """`padded`: how many rows there are with padding; None: whole tiles."""
        segments, positions = runs(starts, ends)
        return cls(
            starts=starts,
            ends=ends,
            count=len(positions),
            offsets=np.cumsum(ends - starts) - (ends - starts),
            segments=pad(segments, padded),
            positions=pad(positions, padded),
        )

    def slices(self) -> list[slice]:
        """Each segment's rows; the last segment's with the padding."""
        bounds = [*self.offsets.tolist(), len(self.positions)]
        return [slice(start, end) for start, end in pairwise(bounds)]


def pad(rows: Ints, padded: int | None = None) -> Ints:
    """[rows] with the last one repeated up to `padded` rows, or to whole tiles."""
    missing = (batch_rows(len(rows)) if padded is None else padded) - len(rows)
    return np.pad(rows, (0, missing), mode="edge") if missing else rows


def runs(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Which run each number of the runs starts[i] … ends[i] - 1 belongs to, and the numbers, run by run."""
    counts = ends - starts
    runs = np.repeat(np.arange(len(starts)), counts)
    return runs, np.arange(len(runs)) + (starts - (np.cumsum(counts) - counts))[runs]


def ring_writes(rows: Rows, slots: Ints, ring_rows: int) -> tuple[Ints, Ints]:
    """The rows that a ring keeps, the last `ring_rows` of each segment, and where, flat over slots."""
    kept = np.flatnonzero((rows.positions >= rows.ends[rows.segments] - ring_rows)[: rows.count])
    return kept, slots[rows.segments[kept]] * ring_rows + rows.positions[kept] % ring_rows
