"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.index_queries import reference, triton_kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e6])
def test_queries_match_whatever_their_size(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    queries = (torch.randn(5, 6, 64, generator=generator) * size).to(dtype)
    queries[1] = 0
    angles = torch.rand(5, 8, generator=generator) * 6
    ours = triton_kernel.index_queries(queries, angles.cos(), angles.sin())
    wanted = reference.index_queries(queries, angles.cos(), angles.sin())
    # The turn may round one unit of its last place apart, and that may cross the middle between two codes.
    assert ours.dtype == dtype and (ours != wanted).float().mean() < 0.01
    largest = wanted.unflatten(2, (2, 32)).abs().amax(dim=-1, keepdim=True)
    assert ((ours - wanted).unflatten(2, (2, 32)).abs() <= 0.34 * largest).all()


def test_no_rows_give_no_rows() -> None:
    empty = torch.zeros(0, 4)
    assert triton_kernel.index_queries(torch.zeros(0, 2, 32), empty, empty).shape == (0, 2, 32)
