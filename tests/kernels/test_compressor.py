from __future__ import annotations

import pytest
import torch

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.compressor import pool_groups

pytestmark = pytest.mark.usefixtures("arithmetic")


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_each_channel_has_a_softmax_of_its_own_over_the_group(ratio: int) -> None:
    values, scores = seeded(5, ratio, 8), seeded(5, ratio, 8, seed=1) * 30
    wanted = (torch.softmax(scores.double(), dim=1) * values.double()).sum(dim=1)
    torch.testing.assert_close(pool_groups(values, scores), wanted.float())


@pytest.mark.parametrize("ratio", [2, 4, 7])
def test_a_group_has_the_same_bits_in_any_batch(ratio: int) -> None:
    assert rows_that_differ(pool_groups, seeded(64, ratio, 24), seeded(64, ratio, 24, seed=1)) == 0


def test_no_groups_give_no_entries() -> None:
    assert pool_groups(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)).shape == (0, 8)
