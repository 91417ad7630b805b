"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.kernels.window_rows import reference, triton_kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-6, 300.0])
def test_records_match_and_other_rows_stay(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, width, pairs = 6, 64, 8
    given = torch.randn(rows, width, generator=generator).to(dtype)
    given[2] = 0
    weight = (torch.rand(width, generator=generator) * size).to(dtype)
    angles = torch.rand(rows, pairs, generator=generator) * 6
    destinations = torch.tensor([3, -1, 9, 0, 5, 7], dtype=torch.int32)
    before = torch.randint(0, 100, (10, FP8_BLOCK32.record_bytes(width)), dtype=torch.uint8, generator=generator)
    ours, theirs = before.clone(), before.clone()
    arguments = (given, weight, angles.cos(), angles.sin(), destinations)
    triton_kernel.write_window_rows(*arguments, ours, eps=1e-20)
    reference.write_window_rows(*arguments, theirs, eps=1e-20)
    untouched = [1, 2, 4, 6, 8]
    assert torch.equal(ours[untouched], before[untouched])
    decoded, expected = (FP8_BLOCK32.decode(pool, width, torch.float32) for pool in (ours, theirs))
    # One unit of the input's dtype may carry a value across a rounding boundary of its code: 1/8 of it at most.
    off = (decoded - expected).abs() > 1e-6 * expected.abs()
    assert off.float().mean() < 0.01
    assert ((decoded - expected).abs() <= 0.126 * expected.abs() + 1e-9).all()
