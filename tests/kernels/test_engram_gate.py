from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.engram_gate import engram_gate

pytestmark = pytest.mark.usefixtures("arithmetic")

WEIGHT = seeded(4, 32, seed=1)


def gate(streams: Tensor, keys: Tensor) -> Tensor:
    return engram_gate(streams, keys, WEIGHT, eps=1e-20)


def test_gates_are_sigmoids_of_signed_roots_of_the_normalised_dot_product() -> None:
    streams, keys = seeded(5, 4, 32), seeded(5, 4, 32, seed=2)
    normed = [x.double() / x.double().square().mean(dim=-1, keepdim=True).sqrt() for x in (streams, keys)]
    dots = (normed[0] * WEIGHT * normed[1]).sum(dim=-1) / 32**0.5
    wanted = torch.sigmoid(dots.sign() * dots.abs().clamp(min=1e-6).sqrt())
    torch.testing.assert_close(gate(streams, keys), wanted.float())


def test_a_dot_product_of_zero_counts_as_a_small_positive_one() -> None:
    wanted = torch.full((1, 4), float(torch.sigmoid(torch.tensor(1e-3))))
    torch.testing.assert_close(gate(torch.zeros(1, 4, 32), seeded(1, 4, 32)), wanted)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    assert rows_that_differ(gate, seeded(64, 4, 32), seeded(64, 4, 32, seed=2)) == 0
