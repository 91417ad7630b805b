"""Brings rows of mapped n-gram tables into memory before they are gathered: whoever needs a page that is not there
waits for the disk, for one page after the other.

    token ids of the next step ─ expect ─▶ rows ─▶ readers, side by side ─▶ page cache ─▶ gathered without waiting

Readers only look at bytes: nothing that is computed depends on them. While all that was looked at lately was in memory
they rest, since looking costs about as much as gathering.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .checkpoint import EngramTable
from .engram_reads import EngramReads

READERS = 16
"""Reads of the disk that are under way at once."""
PIECE_MAX, PIECE_MIN = 2048, 8
"""Rows that a reader looks at before it says how many pages were not there."""
EXPECTED_MAX = 4
"""Steps that wait to be looked at; what is expected beyond them is not."""

Rows = Mapping[int, Tensor]
"""By layer, of its table: int64."""


class EngramAhead:
    """Of one network. For any thread."""

    def __init__(self, tables: Mapping[int, EngramTable], reads: EngramReads) -> None:
        self._tables = tables
        self._reads = reads
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="engram-reader")
        self._expecting = ThreadPoolExecutor(1, thread_name_prefix="engram-ahead")
        self._expected = 0

    def expect(self, rows_of: Callable[[], Rows]) -> None:
        """A step will need these rows. Never waits."""
        if not self._reads.cold or self._expected >= EXPECTED_MAX:
            return
        self._expected += 1
        self._expecting.submit(self._look_at, rows_of)

    def bring(self, rows: Rows) -> None:
        """A step needs these rows now: where they may not be in memory, read them side by side."""
        if self._reads.cold:
            self._wait_for(self._looks(rows))

    def _look_at(self, rows_of: Callable[[], Rows]) -> None:
        try:
            self._wait_for(self._looks(rows_of()))
        finally:
            self._expected -= 1

    def _looks(self, rows: Rows) -> list[Future[int]]:
        each = max(PIECE_MIN, min(PIECE_MAX, sum(ids.numel() for ids in rows.values()) // READERS))
        pieces = ((self._tables[layer], piece) for layer, ids in rows.items() for piece in ids.flatten().split(each))
        return [self._readers.submit(_look, table, piece.numpy()) for table, piece in pieces]

    def _wait_for(self, looks: Sequence[Future[int]]) -> None:
        for look in looks:
            look.add_done_callback(lambda done: self._reads.note_ahead(done.result()))
        wait(looks)
        self._reads.cold = any(look.result() for look in looks)


def _look(table: EngramTable, ids: NDArray[np.int64]) -> int:
    """Pages that were not in memory. NumPy lets other threads run meanwhile."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    for tensor in table.stored:
        row_bytes = tensor[0].numel() * tensor.element_size()
        flat = tensor.flatten().numpy()
        np.take(flat, ids * row_bytes)
        np.take(flat, ids * row_bytes + (row_bytes - 1))  # a row may reach into a second page
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before
