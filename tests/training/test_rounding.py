"""What training rounds to is what the caches hold, bit for bit; Sinkhorn's gradient is its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whalepod.kernels.mhc import split_mixes
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat
from whalepod.training import rounding
from whalepod.training.sinkhorn import go_back, normalise, sinkhorn

FORMATS = [
    (FP8_BLOCK32, rounding.window_rows),
    (FP4_BLOCK16, rounding.global_entries),
    (MXFP4_BLOCK32, rounding.index_keys),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("form", "rounded"), FORMATS)
def test_values_are_those_of_the_records(form: PackedFormat, rounded: Callable[[Tensor], Tensor]) -> None:
    spread = drawn(400, 64) * torch.logspace(-6, 3, 400).unsqueeze(1)
    ties = torch.arange(-24, 24).repeat(4)[:128].view(2, 64) / 4
    x = torch.cat((spread, ties, torch.zeros(1, 64)))
    assert torch.equal(rounded(x), form.round_trip(x))


@pytest.mark.parametrize(("form", "rounded"), FORMATS)
def test_gradients_pass_straight_through(form: PackedFormat, rounded: Callable[[Tensor], Tensor]) -> None:
    x = drawn(3, 64).requires_grad_(True)
    rounded(x).backward(drawn(3, 64, seed=1))
    assert x.grad is not None and torch.equal(x.grad, drawn(3, 64, seed=1))


def test_sinkhorn_is_the_servers() -> None:
    logits = drawn(33, 24).double()
    ones = torch.ones(24, dtype=torch.float64)
    wanted = split_mixes(logits, ones, ones * 0, eps=1e-6, iterations=20).comb
    found = sinkhorn(logits[:, 8:].unflatten(1, (4, 4)), eps=1e-6, iterations=20)
    assert float((wanted - found).abs().max()) < 1e-14


def test_sinkhorns_gradient_is_that_of_its_steps() -> None:
    logits = drawn(5, 4, 4).double().requires_grad_(True)
    comb, sums = normalise(logits, eps=1e-6, iterations=20)
    (wanted,) = torch.autograd.grad(comb, logits, drawn(5, 4, 4, seed=2).double())
    found = go_back(comb.detach(), sums.detach(), drawn(5, 4, 4, seed=2).double(), eps=1e-6)
    assert float((wanted - found).abs().max()) < 1e-12
    assert float(wanted.abs().max()) > 1e-3
