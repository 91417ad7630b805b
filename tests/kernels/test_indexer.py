from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.indexer import candidate_mask, index_scores, select_top
from whalepod.kernels.indexer.reference import KEY_TILE

pytestmark = pytest.mark.usefixtures("arithmetic")

HEADS, WIDTH = 5, 16


@pytest.mark.parametrize("entries", [1, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 3 * KEY_TILE])
def test_scores_weigh_the_positive_part_of_each_head(entries: int) -> None:
    queries, weights, keys = seeded(9, HEADS, WIDTH), seeded(9, HEADS, seed=1), seeded(entries, WIDTH, seed=2)
    wanted = torch.einsum("thj,th->tj", torch.einsum("thd,jd->thj", queries, keys).relu(), weights)
    torch.testing.assert_close(index_scores(queries, weights, keys), wanted, atol=1e-5, rtol=1e-5)


def test_a_score_has_the_same_bits_whatever_the_rows_and_entries() -> None:
    keys = seeded(300, WIDTH, seed=2)
    queries, weights = seeded(64, HEADS, WIDTH), seeded(64, HEADS, seed=1)
    assert rows_that_differ(lambda q, w: index_scores(q, w, keys), queries, weights) == 0
    scores = index_scores(queries, weights, keys)
    for entries in (1, 63, 128, 130, 299):
        assert torch.equal(index_scores(queries, weights, keys[:entries]), scores[:, :entries])


def everything(scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool)


def test_the_best_entries_come_out_ascending() -> None:
    scores = torch.tensor([[0.1, 5.0, -2.0, 3.0, 4.0]])
    assert select_top(scores, everything(scores), count=3).tolist() == [[1, 3, 4]]


def test_ties_go_to_the_lower_entry_whatever_the_width() -> None:
    scores = torch.zeros(1, 1000)
    scores[0, [17, 900]] = 1.0
    for width, wanted in ((20, [0, 1, 2, 3, 17]), (400, [0, 1, 2, 3, 17]), (1000, [0, 1, 2, 17, 900])):
        some = scores[:, :width]
        assert select_top(some, everything(some), count=5).tolist() == [wanted]


def test_fewer_allowed_entries_than_wanted_leave_minus_one() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    allowed = torch.tensor([[True, False, False, True], [False, False, False, False]])
    assert select_top(scores, allowed, count=3).tolist() == [[0, 3, -1], [-1, -1, -1]]
    assert select_top(scores[:, :2], allowed[:, :2], count=3).tolist() == [[0, -1, -1], [-1, -1, -1]]


def test_negative_scores_are_chosen_before_entries_that_are_not_allowed() -> None:
    scores, allowed = torch.tensor([[-5.0, 9.0, -6.0, -7.0]]), torch.tensor([[True, False, True, True]])
    assert select_top(scores, allowed, count=2).tolist() == [[0, 2]]


def test_the_block_of_the_newest_entry_is_always_a_candidate() -> None:
    scores = torch.tensor([[9.0, 9.0, 8.0, 0.0, 1.0, -5.0, 0.0]])
    mask = candidate_mask(scores, torch.tensor([6]), block=2, top_blocks=2)
    assert mask.long().tolist() == [[1, 1, 0, 0, 1, 1, 0]]


def test_a_block_scores_as_its_best_visible_entry() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, -9.0, 0.0, 0.0, 99.0, 99.0]])
    mask = candidate_mask(scores, torch.tensor([6]), block=2, top_blocks=2)
    assert mask.long().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]


def test_equal_blocks_go_to_the_lower_one_and_unseen_blocks_never() -> None:
    mask = candidate_mask(torch.zeros(2, 9), torch.tensor([9, 1]), block=2, top_blocks=3)
    assert mask.long().tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
