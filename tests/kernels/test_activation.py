from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.activation import sigmoid, silu, softplus, swiglu

EXTREME = torch.tensor([-1e4, -100.0, -20.0, -1e-8, 0.0, 1e-8, 1.0, 20.0, 100.0, 1e4])
PAIRS = [(sigmoid, torch.sigmoid), (silu, functional.silu), (softplus, functional.softplus)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_functions_are_the_usual_ones_without_overflow(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    x = torch.cat((EXTREME, seeded(1000)))
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_an_element_has_the_same_bits_wherever_it_lies(function: Callable[[Tensor], Tensor]) -> None:
    assert rows_that_differ(function, seeded(64, 3) * 4) == 0


def test_the_check_sees_that_the_librarys_function_depends_on_the_place() -> None:
    assert rows_that_differ(functional.softplus, seeded(64, 3) * 4) > 0


def test_the_gate_is_clamped_above_and_the_other_half_on_both_sides() -> None:
    gate, up = torch.tensor([-30.0, 3.0, 30.0]), torch.tensor([-30.0, 3.0, 30.0])
    wanted = functional.silu(torch.tensor([-30.0, 3.0, 10.0])) * torch.tensor([-10.0, 3.0, 10.0])
    torch.testing.assert_close(swiglu(gate, up, limit=10.0), wanted)
