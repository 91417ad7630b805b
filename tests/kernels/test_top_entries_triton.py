"""The Triton kernels against the reference, in Triton's interpreter on the CPU: indices are equal."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.top_entries import reference, triton_kernel

COUNT = 16
VISIBLE = [3, 16, 17, 300]


def scores(*, seed: int = 0, entries: int = 300) -> Tensor:
    return torch.randn(len(VISIBLE), entries, generator=torch.Generator().manual_seed(seed))


def assert_equal(given: Tensor, *, capacity: int = 128, count: int = COUNT) -> None:
    visible = torch.tensor(VISIBLE, dtype=torch.int32)
    with forced("group_maxima", CHUNK=128):
        out = triton_kernel.top_entries(given, visible, count=count, capacity=capacity)
    assert torch.equal(out, reference.top_entries(given, visible, count=count))


def test_distinct_scores_give_the_best_in_ascending_order() -> None:
    assert_equal(scores())


@pytest.mark.parametrize("capacity", [16, 512])
def test_ties_go_to_the_lower_entry_whether_they_fit_the_buffer_or_not(capacity: int) -> None:
    assert_equal(scores().round(), capacity=capacity)
    assert_equal(torch.zeros(len(VISIBLE), 300), capacity=capacity)


def test_both_zeros_tie() -> None:
    rounded = scores().clamp(max=0).round()
    rounded[:, ::3] *= -1
    assert_equal(rounded.clamp(max=0) * torch.where(torch.arange(300) % 2 == 0, 1.0, -1.0).clamp(min=-0.0))


def test_negative_and_infinite_scores_keep_their_order() -> None:
    given = -scores().abs()
    given[:, 5] = torch.inf
    given[:, 7:20] = -torch.inf
    assert_equal(given)


def test_what_lies_beyond_the_visible_entries_does_not_matter() -> None:
    given = scores()
    other = given.clone()
    for row, visible in enumerate(VISIBLE):
        other[row, visible:] = torch.inf
    visible = torch.tensor(VISIBLE, dtype=torch.int32)
    with forced("group_maxima", CHUNK=128):
        first, second = (triton_kernel.top_entries(some, visible, count=COUNT) for some in (given, other))
    assert torch.equal(first, second)


def test_groups_of_several_entries_are_searched_exactly() -> None:
    wide = torch.randn(len(VISIBLE), 700, generator=torch.Generator().manual_seed(1))
    assert triton_kernel.group_entries(700, count=COUNT) > 1
    assert_equal(wide)
    assert_equal(wide.mul(2).round())


@pytest.mark.parametrize("count", [1, COUNT])
def test_rows_of_one_call_that_see_few_and_many_entries(count: int) -> None:
    # Groups of 64, 8 and 1 entries in turn where 16 are wanted.
    visible = torch.tensor([9000, 1025, 1024, 128, 129, 40, 1, 0], dtype=torch.int32)
    wide = torch.randn(len(visible), 9000, generator=torch.Generator().manual_seed(2))
    for given in (wide, wide.mul(2).round(), wide.clamp(max=0)):
        out = triton_kernel.top_entries(given, visible, count=count)
        assert torch.equal(out, reference.top_entries(given, visible, count=count))


def test_a_row_that_is_not_contiguous_is_read_where_it_lies() -> None:
    assert_equal(scores(entries=600)[:, :300])
