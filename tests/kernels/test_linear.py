from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.linear import grouped_linear, linear
from whalepod.kernels.numerics import ROW_TILE

pytestmark = pytest.mark.usefixtures("arithmetic")

SHAPES = [(64, 512), (512, 64), (192, 640), (128, 16), (33, 7), (34, 3), (26, 2), (6, 5)]


@pytest.mark.parametrize("rows", [0, 1, ROW_TILE - 1, ROW_TILE, ROW_TILE + 1, 3 * ROW_TILE])
def test_any_number_of_rows_is_multiplied(rows: int) -> None:
    x, weight = seeded(rows, 24), seeded(10, 24, seed=1)
    torch.testing.assert_close(linear(x, weight), (x.double() @ weight.double().t()).float())


@pytest.mark.parametrize(("width", "out"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_the_same_bits_in_any_batch(width: int, out: int, dtype: torch.dtype) -> None:
    weight = seeded(out, width, seed=1, dtype=dtype)
    assert rows_that_differ(lambda x: linear(x, weight), seeded(64, width, dtype=dtype)) == 0


def test_the_check_sees_that_an_ordinary_product_depends_on_the_batch() -> None:
    weight = seeded(512, 64, seed=1)
    assert rows_that_differ(lambda x: x @ weight.t(), seeded(64, 64)) > 0


def test_bfloat16_is_summed_in_float32_and_rounded_once() -> None:
    x, weight = seeded(3, 256, dtype=torch.bfloat16), seeded(5, 256, seed=1, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t()
    assert torch.equal(linear(x, weight), exact.float().bfloat16())
    torch.testing.assert_close(linear(x, weight, out_dtype=torch.float32), exact.float())


def test_rows_need_not_be_contiguous() -> None:
    x = seeded(24, 16).t()
    weight = seeded(5, 24, seed=1)
    torch.testing.assert_close(linear(x, weight), x @ weight.t())


def test_each_group_of_channels_meets_its_own_matrix() -> None:
    x, weight = seeded(11, 2, 32), seeded(2, 6, 32, seed=1)

    def separately(x: Tensor) -> Tensor:
        return torch.stack([x[:, group] @ weight[group].t() for group in range(2)], dim=1)

    torch.testing.assert_close(grouped_linear(x, weight), separately(x))
    assert rows_that_differ(lambda x: grouped_linear(x, weight), seeded(64, 2, 32)) == 0


def test_a_row_has_the_same_bits_in_any_batch_with_a_narrow_matrix_a_group() -> None:
    weight = seeded(1, 3, 34, seed=1)
    assert rows_that_differ(lambda x: grouped_linear(x, weight), seeded(64, 1, 34)) == 0
