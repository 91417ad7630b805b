"""All runs in one launch, in Triton: a table of addresses, and programs that each copy a piece of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import RecordRun

FIELDS = tl.constexpr(7)
BLOCK = 2048
"""Units that a program copies."""


@triton.jit
def copy_runs_kernel(table, data, BLOCK: tl.constexpr, UNIT: tl.constexpr, GATHER: tl.constexpr):
    """table [runs, FIELDS] int64: address of the records, their rows, first row, count, units of a record, of its
    codes, and where its data begins in units. A unit is UNIT bytes: 1 or 4."""
    row_of_table = table + tl.program_id(0) * FIELDS
    dtype: tl.constexpr = tl.uint32 if UNIT == 4 else tl.uint8
    records = tl.load(row_of_table).to(tl.pointer_type(dtype))
    rows = tl.load(row_of_table + 1).to(tl.int32)
    first = tl.load(row_of_table + 2).to(tl.int32)
    count = tl.load(row_of_table + 3).to(tl.int32)
    width = tl.load(row_of_table + 4).to(tl.int32)
    codes = tl.load(row_of_table + 5).to(tl.int32)
    start = tl.load(row_of_table + 6)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < count * width
    scale_at = at - count * codes
    is_code = scale_at < 0
    each = tl.where(is_code, codes, tl.maximum(width - codes, 1))
    place = tl.where(is_code, at, scale_at)
    row = place // each
    column = place - row * each + tl.where(is_code, 0, codes)
    row += first
    row = tl.where(row >= rows, row - rows, row)
    where = row.to(tl.int64) * width + column
    if GATHER:
        tl.store(data + start + at, tl.load(records + where, mask=there), mask=there)
    else:
        tl.store(records + where, tl.load(data + start + at, mask=there), mask=there)


def copy_runs(runs: Sequence[RecordRun], data: Tensor, *, gather: bool) -> None:
    """Between the records and `data` [bytes] uint8, on a GPU, or in Triton's interpreter."""
    unit = 4 if all(run.pool.in_words for run in runs) and data.data_ptr() % 4 == 0 else 1
    lines: list[tuple[int, ...]] = []
    start = longest = 0
    for run in runs:
        pool, count = run.pool, run.count
        assert count <= pool.rows, (count, pool.rows)
        if count:
            address, width = pool.address + run.ring * pool.rows * pool.record_bytes, pool.record_bytes // unit
            lines.append((address, pool.rows, run.first % pool.rows, count, width, pool.code_bytes // unit, start))
            start += count * width
            longest = max(longest, count * width)
    if not lines:
        return
    table = torch.tensor(lines, dtype=torch.int64, pin_memory=data.is_cuda).to(data.device, non_blocking=True)
    copy_runs_kernel[(len(lines), triton.cdiv(longest, BLOCK))](
        table, data.view(torch.uint32) if unit == 4 else data, BLOCK=BLOCK, UNIT=unit, GATHER=gather, num_warps=4
    )
