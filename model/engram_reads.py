"""Counts how n-gram rows are read from their mapped tables, and how often that waited for the disk."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager


class EngramReads:
    """Of one network. Written by the thread that computes steps, read by any."""

    def __init__(self) -> None:
        self.rows = 0
        """Of all tables together."""
        self.cold_pages = 0
        """Pages that were not in memory: the process's major faults while rows were read. Mapped tables are the page
        cache's, so whoever needs memory on the machine may push them out."""

    @contextmanager
    def reading(self, rows: int) -> Generator[None]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        yield
        self.cold_pages += resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
        self.rows += rows
