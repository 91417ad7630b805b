"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.record_runs import RecordPool, RecordRun, reference, runs_bytes, triton_kernel

Records = list[Tensor]


def _records(widths: tuple[int, ...]) -> Records:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (3, 11, width), dtype=torch.uint8, generator=generator) for width in widths]


def _runs(records: Records, codes: tuple[int, ...]) -> list[RecordRun]:
    """None, all, one, several over the end, several from a place behind it."""
    places = [(3, 0), (0, 11), (10, 1), (7, 9), (15, 6)]
    return [
        RecordRun(RecordPool(each, code_bytes), 1, first, count)
        for each, (first, count), code_bytes in zip(records, places, codes, strict=True)
    ]


SIZES = pytest.mark.parametrize(
    ("widths", "codes"),
    [((17, 36, 66, 36, 17), (16, 32, 64, 32, 16)), ((528, 288, 68, 64, 528), (512, 256, 64, 64, 512))],
    ids=["bytes", "words"],
)


@SIZES
def test_gathered_runs_are_codes_then_scales(widths: tuple[int, ...], codes: tuple[int, ...]) -> None:
    runs = _runs(_records(widths), codes)
    data = torch.full((runs_bytes(runs),), 99, dtype=torch.uint8)
    triton_kernel.copy_runs(runs, data, gather=True)
    assert torch.equal(data, reference.gather_runs(runs))
    third = runs[2].pool.records[1, 10]
    before = runs[0].bytes + runs[1].bytes
    assert torch.equal(data[before : before + widths[2]], third)


@SIZES
def test_scattered_runs_come_back_and_other_records_stay(widths: tuple[int, ...], codes: tuple[int, ...]) -> None:
    ours, theirs = _records(widths), _records(widths)
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 256, (runs_bytes(_runs(ours, codes)),), dtype=torch.uint8, generator=generator)
    triton_kernel.copy_runs(_runs(ours, codes), data, gather=False)
    reference.scatter_runs(_runs(theirs, codes), data)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(reference.gather_runs(_runs(ours, codes)), data)


def test_no_runs_are_no_bytes() -> None:
    assert reference.gather_runs([]).numel() == 0
    triton_kernel.copy_runs([], torch.empty(0, dtype=torch.uint8), gather=True)
