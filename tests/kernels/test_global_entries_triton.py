"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.global_entries import keep_raw_rows, reference, triton_kernel, write_global_entries
from whalepod.kernels.quantise import FP4_BLOCK16, MXFP4_BLOCK32

WIDTH, KEY_WIDTH, PAIRS, POOL = 128, 64, 8, 40


def arguments(ratio: int, dtype: torch.dtype, rows: int = 19) -> list[Any]:
    generator = torch.Generator().manual_seed(ratio)
    ring = torch.randn(12, 2 * WIDTH, generator=generator) if ratio > 1 else None
    earlier = None
    if ratio > 1:
        # The first group's other rows lie in the ring, those of the next are rows of this forward.
        earlier = torch.arange(rows)[:, None] + torch.arange(1 - ratio, 0)
        earlier = torch.where(earlier >= 0, earlier, -1 - (earlier % 12)).int()
    destinations = torch.full((rows,), -1, dtype=torch.int32)
    ends = torch.arange(ratio - 1, rows, ratio)
    destinations[ends] = torch.randperm(POOL, generator=generator)[: len(ends)].int()
    destinations[0] = POOL - 1 if ratio > 1 and POOL - 1 not in destinations else destinations[0]
    angles = torch.rand(rows, PAIRS, generator=generator) * 6
    return [
        torch.randn(rows, WIDTH if ratio == 1 else 2 * WIDTH, generator=generator),
        ring,
        earlier,
        torch.rand(WIDTH, generator=generator).to(dtype),
        (torch.randn(KEY_WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(dtype),
        torch.rand(KEY_WIDTH, generator=generator).to(dtype),
        angles.cos(),
        angles.sin(),
        destinations,
    ]


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return (
        torch.randint(0, 100, (POOL, FP4_BLOCK16.record_bytes(WIDTH)), dtype=torch.uint8, generator=generator),
        torch.randint(0, 100, (POOL, MXFP4_BLOCK32.record_bytes(KEY_WIDTH)), dtype=torch.uint8, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_records_match_and_others_stay(ratio: int, dtype: torch.dtype) -> None:
    given = arguments(ratio, dtype)
    ours, theirs = pools(), pools()
    triton_kernel.write_global_entries(*[*given, *ours], eps=1e-20)
    reference.write_global_entries(*[*given, *theirs], eps=1e-20)
    written = given[8][given[8] >= 0].long()
    others = torch.ones(POOL, dtype=torch.bool).index_fill(0, written, False)
    for kind, width, mine, wanted in zip((FP4_BLOCK16, MXFP4_BLOCK32), (WIDTH, KEY_WIDTH), ours, theirs, strict=True):
        assert torch.equal(mine[others], wanted[others])
        a, b = (kind.decode(pool[written], width, torch.float32) for pool in (mine, wanted))
        # Sums have another order: a value may cross the middle between two codes, and a group that between two scales.
        assert (a != b).float().mean() < 0.02
        assert (a - b).norm() < 0.05 * b.norm()


def test_the_entry_point_takes_the_reference_for_cpu_tensors() -> None:
    given, ours, theirs = arguments(2, torch.float32), pools(), pools()
    write_global_entries(*[*given, *ours], eps=1e-20)
    reference.write_global_entries(*[*given, *theirs], eps=1e-20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_raw_rows_go_where_they_are_kept() -> None:
    raw, places = torch.arange(12.0).view(4, 3), torch.tensor([5, -1, 0, 2], dtype=torch.int32)
    ours, wanted = torch.zeros(6, 3), torch.zeros(6, 3)
    triton_kernel.keep_raw_rows(raw, places, ours)
    keep_raw_rows(raw, places, wanted)
    assert torch.equal(ours, wanted) and torch.equal(ours[[5, 0, 2]], raw[[0, 2, 3]])
