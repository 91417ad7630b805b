"""Runs of records in plain torch: one index operation for the codes of a run, one for its scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class RecordPool:
    """Rings of records in one tensor. What is asked for again and again is kept as plain numbers."""

    def __init__(self, records: Tensor, code_bytes: int) -> None:
        """`records` [rings, rows, record_bytes] uint8, contiguous; the first `code_bytes` of each are codes, the rest
        are their scales."""
        assert records.dtype == torch.uint8 and records.ndim == 3 and records.is_contiguous(), records.shape
        self.records = records
        self.code_bytes = code_bytes
        self.rows, self.record_bytes = records.shape[1:]
        self.address = records.data_ptr()
        self.in_words = (self.record_bytes | code_bytes | self.address) % 4 == 0
        """Whether all of it lies at multiples of four bytes."""


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Rows `first` … `first + count - 1` of a ring, which begins again behind its last row."""

    pool: RecordPool
    ring: int
    first: int
    count: int
    """At most the pool's rows."""

    @property
    def bytes(self) -> int:
        return self.count * self.pool.record_bytes

    @property
    def index(self) -> Tensor:
        """[count] int64: its rows."""
        device = self.pool.records.device
        return torch.arange(self.first, self.first + self.count, device=device) % self.pool.rows


def gather_runs(runs: Sequence[RecordRun]) -> Tensor:
    pieces: list[Tensor] = []
    for run in runs:
        rows, codes = run.pool.records[run.ring, run.index], run.pool.code_bytes
        pieces += (rows[:, :codes].reshape(-1), rows[:, codes:].reshape(-1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def scatter_runs(runs: Sequence[RecordRun], data: Tensor) -> None:
    start = 0
    for run in runs:
        pool, index = run.pool, run.index
        codes, end = start + run.count * pool.code_bytes, start + run.bytes
        ring = pool.records[run.ring]
        ring[index, : pool.code_bytes] = data[start:codes].view(run.count, pool.code_bytes)
        ring[index, pool.code_bytes :] = data[codes:end].view(run.count, pool.record_bytes - pool.code_bytes)
        start = end
