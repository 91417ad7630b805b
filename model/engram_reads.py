"""Counts how n-gram rows are read from their mapped tables, and how often that waited for the disk."""

from __future__ import annotations

import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager


class EngramReads:
    """Of one network. `reading` is for the thread that computes steps, everything else for any."""

    def __init__(self) -> None:
        self.rows = 0
        """Of all tables together."""
        self.cold_pages = 0
        """Pages that were not in memory when they were needed: the process's major faults while rows were read. Mapped
        tables are the page cache's, so whoever needs memory on the machine may push them out."""
        self.ahead_pages = 0
        """Pages that were not in memory, and were read before they were needed, or side by side."""
        self.cold = True
        """Some of what was looked at last was not in memory."""
        self._counting = threading.Lock()

    def note_ahead(self, pages: int) -> None:
        with self._counting:
            self.ahead_pages += pages

    @contextmanager
    def reading(self, rows: int) -> Generator[None]:
        before, ahead_before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, self.ahead_pages
        yield
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
        pages = max(0, faults - (self.ahead_pages - ahead_before))  # others are read meanwhile
        self.cold_pages += pages
        self.cold |= pages > 0
        self.rows += rows
