from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.activation import swiglu
from whalepod.kernels.experts import dense_expert, routed_experts
from whalepod.kernels.quantise import FP8_BLOCK32

pytestmark = pytest.mark.usefixtures("arithmetic")

EXPERTS, WIDTH, INNER, CHOSEN = 6, 32, 32, 2
GATE_UP, DOWN = seeded(EXPERTS, 2 * INNER, WIDTH, seed=1), seeded(EXPERTS, WIDTH, INNER, seed=2)


def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return routed_experts(x, ids, weights, GATE_UP, DOWN, limit=1.5)


def choices(rows: int, experts: int = EXPERTS) -> Tensor:
    return torch.stack([seeded(experts, seed=row).argsort()[:CHOSEN] for row in range(rows)])


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40])
def test_rows_sum_their_chosen_experts(rows: int) -> None:
    x, ids, weights = seeded(rows, WIDTH), choices(rows), seeded(rows, CHOSEN, seed=3)
    wanted = torch.zeros(rows, WIDTH)
    for row in range(rows):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            gate, up = (GATE_UP[expert] @ x[row]).chunk(2)
            wanted[row] += weight * (DOWN[expert] @ swiglu(gate, up, limit=1.5))
    torch.testing.assert_close(run(x, ids, weights), wanted, atol=1e-4, rtol=1e-4)


def test_all_rows_may_choose_one_expert_and_leave_the_others_idle() -> None:
    ids = torch.tensor([[4, 4]]).expand(17, 2)
    x, halves = seeded(17, WIDTH), torch.full((17, 2), 0.5)
    torch.testing.assert_close(run(x, ids, halves), dense_expert(x, GATE_UP[4], DOWN[4], limit=1.5))


def test_no_rows_give_no_rows() -> None:
    none = torch.zeros(0, CHOSEN)
    assert run(torch.zeros(0, WIDTH), none.long(), none).shape == (0, WIDTH)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    assert rows_that_differ(run, seeded(64, WIDTH), choices(64), seeded(64, CHOSEN, seed=3)) == 0


def test_inputs_of_both_matrices_are_rounded_when_asked() -> None:
    x = seeded(5, WIDTH)
    gate, up = (FP8_BLOCK32.round_trip(x) @ GATE_UP[0].t()).chunk(2, dim=1)
    wanted = FP8_BLOCK32.round_trip(swiglu(gate, up, limit=1.5)) @ DOWN[0].t()
    got = dense_expert(x, GATE_UP[0], DOWN[0], limit=1.5, input_format=FP8_BLOCK32)
    torch.testing.assert_close(got, wanted)
    ids, ones = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    routed = routed_experts(x, ids, ones, GATE_UP, DOWN, limit=1.5, input_format=FP8_BLOCK32)
    torch.testing.assert_close(routed, wanted)
