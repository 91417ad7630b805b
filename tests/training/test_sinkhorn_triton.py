"""Sinkhorn and its gradient in Triton against plain torch, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.training import sinkhorn_kernel
from whalepod.training.sinkhorn import go_back, normalise


@pytest.mark.parametrize("rows", [3, 64, 70])
@pytest.mark.parametrize("iterations", [1, 5])
def test_both_ways_are_the_plain_ones(rows: int, iterations: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits, grad = 3 * torch.randn(2, rows, 4, 4, generator=generator)
    wanted, wanted_sums = normalise(logits, eps=1e-6, iterations=iterations)
    comb, sums = sinkhorn_kernel.forward(logits, eps=1e-6, iterations=iterations)
    torch.testing.assert_close(comb, wanted)
    torch.testing.assert_close(sums, wanted_sums)
    torch.testing.assert_close(
        sinkhorn_kernel.backward(comb, sums, grad, eps=1e-6), go_back(wanted, wanted_sums, grad, eps=1e-6)
    )
