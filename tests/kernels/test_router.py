from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.router import route

pytestmark = pytest.mark.usefixtures("arithmetic")

WEIGHT = seeded(10, 32, seed=1)


def test_the_bias_chooses_and_the_plain_scores_weigh() -> None:
    x, bias = seeded(6, 32), torch.zeros(10)
    bias[7] = 100.0
    ids, weights = route(x, WEIGHT, bias, chosen=3, factor=1.5)
    assert ids[:, 0].tolist() == [7] * 6
    scores = functional.softplus(x @ WEIGHT.t()).sqrt().gather(1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(dim=1, keepdim=True) * 1.5)


def test_ties_go_to_the_lower_id() -> None:
    ids, _ = route(torch.zeros(2, 32), WEIGHT, torch.zeros(10), chosen=4, factor=1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_a_single_expert_is_not_normalised() -> None:
    x = seeded(3, 32)
    ids, weights = route(x, WEIGHT, torch.zeros(10), chosen=1, factor=1.5)
    torch.testing.assert_close(weights, functional.softplus(x @ WEIGHT.t()).sqrt().gather(1, ids) * 1.5)


def test_rows_may_have_biases_of_their_own() -> None:
    x, biases = seeded(2, 32), torch.zeros(2, 10)
    biases[0, 3] = biases[1, 4] = 100.0
    ids, _ = route(x, WEIGHT, biases, chosen=2, factor=1.0)
    assert ids[:, 0].tolist() == [3, 4]


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    def choose(x: Tensor) -> Tensor:
        ids, weights = route(x, WEIGHT, torch.zeros(10), chosen=3, factor=1.5)
        return torch.cat((ids.float(), weights), dim=1)

    assert rows_that_differ(choose, seeded(64, 32)) == 0
