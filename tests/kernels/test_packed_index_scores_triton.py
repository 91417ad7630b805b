"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.packed_index_scores import reference, triton_kernel
from whalepod.kernels.quantise import MXFP4_BLOCK32

BLOCK = 16


def check(visible: list[int], groups: list[tuple[int, int, int]], group_rows: int, keys: Tensor | None = None) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, heads, entries = len(visible), 16, 92
    queries = MXFP4_BLOCK32.round_trip(torch.randn(rows, heads, 128, generator=generator).bfloat16())
    weights = torch.randn(rows, heads, generator=generator)
    pool = MXFP4_BLOCK32.encode(torch.randn(200, 128, generator=generator)) if keys is None else keys
    tables = torch.stack([torch.randperm(12, generator=generator) for _ in range(2)]).int()
    seen = torch.tensor(visible, dtype=torch.int32)
    arguments = (queries, weights, pool, tables, seen, torch.tensor(groups, dtype=torch.int32).t().contiguous())
    with forced("index_scores", KEYS=32):
        out = triton_kernel.packed_index_scores(
            *arguments, entries_per_block=BLOCK, group_rows=group_rows, entries_max=entries
        )
    expected = reference.packed_index_scores(*arguments, entries_per_block=BLOCK, entries_max=entries)
    shown = torch.arange(entries) < seen[:, None]
    # Products are exact, sums of 128 products and 16 heads are float32 in another order.
    torch.testing.assert_close(out[shown], expected[shown], rtol=1e-5, atol=1e-4)


def test_groups_of_different_sizes_and_sequences_match() -> None:
    check([0, 5, 90, 91, 92, 20, 37], [(0, 2, 0), (2, 3, 1), (5, 2, 0)], group_rows=3)


def test_one_row_a_sequence_matches() -> None:
    check([17, 92], [(0, 1, 1), (1, 1, 0)], group_rows=1)


def test_visible_entries_that_end_at_before_and_after_a_tile_match() -> None:
    check([31, 32, 33], [(0, 3, 0)], group_rows=4)


def test_keys_whose_groups_differ_by_two_to_the_eleven_are_exact() -> None:
    keys = torch.randint(0, 256, (200, 68), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    keys[:, 64:] = torch.tensor([127, 116, 122, 119])
    check([92, 92], [(0, 2, 0)], group_rows=2, keys=keys)


def test_keys_of_zeros_score_zero() -> None:
    check([92], [(0, 1, 0)], group_rows=1, keys=MXFP4_BLOCK32.encode(torch.zeros(200, 128)))
