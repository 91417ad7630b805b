"""Records of the caches, scattered over many tensors, as one string of bytes and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .reference import RecordPool, RecordRun

__all__ = ["RecordPool", "RecordRun", "gather_runs", "runs_bytes", "scatter_runs"]


def runs_bytes(runs: Sequence[RecordRun]) -> int:
    return sum(run.count * run.pool.record_bytes for run in runs)


def gather_runs(runs: Sequence[RecordRun]) -> Tensor:
    """[bytes] uint8, where the records are: run by run, first the codes of its records, then their scales.

    On a GPU this waits for nothing: it is queued on the current stream.
    """
    if not runs or not runs[0].pool.records.is_cuda:
        return reference.gather_runs(runs)
    from . import triton_kernel

    data = torch.empty(runs_bytes(runs), dtype=torch.uint8, device=runs[0].pool.records.device)
    triton_kernel.copy_runs(runs, data, gather=True)
    return data


def scatter_runs(runs: Sequence[RecordRun], data: Tensor) -> None:
    """Write what `gather_runs` gives: `data` [bytes] uint8, on the device of the records. No record is in two runs."""
    assert data.shape == (runs_bytes(runs),) and data.dtype == torch.uint8, (data.shape, runs_bytes(runs))
    if not data.is_cuda:
        reference.scatter_runs(runs, data)
        return
    from . import triton_kernel

    triton_kernel.copy_runs(runs, data, gather=False)
