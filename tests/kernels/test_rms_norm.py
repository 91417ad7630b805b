from __future__ import annotations

import pytest
import torch

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.rms_norm import rms_norm

pytestmark = pytest.mark.usefixtures("arithmetic")


def test_rows_are_scaled_to_unit_mean_square_times_weight() -> None:
    x, weight = seeded(5, 33), seeded(33, seed=1)
    wide = x.double()
    wanted = wide / wide.square().mean(dim=-1, keepdim=True).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-20), wanted.float())


def test_a_row_of_zeros_stays_zero_with_the_smallest_eps() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-20), torch.zeros(2, 8))


def test_bfloat16_is_normalised_in_float32_and_rounded_once() -> None:
    x, weight = seeded(4, 128, dtype=torch.bfloat16), seeded(128, seed=1, dtype=torch.bfloat16)
    wanted = rms_norm(x.float(), weight.float(), eps=1e-20).bfloat16()
    assert torch.equal(rms_norm(x, weight, eps=1e-20), wanted)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    for width in (32, 100, 512):
        weight = seeded(width, seed=1)
        assert rows_that_differ(lambda x, w=weight: rms_norm(x, w, eps=1e-20), seeded(64, width)) == 0
