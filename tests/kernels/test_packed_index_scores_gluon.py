"""The Hopper kernel against the reference: it has no interpreter, so these need the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whalepod.kernels.packed_index_scores import reference
from whalepod.kernels.quantise import MXFP4_BLOCK32

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an H100 or H200")

BLOCK, SEQUENCES = 16, 3


def check(
    counts: list[int],
    visible: list[int],
    entries: int,
    *,
    heads: int = 32,
    keys: Tensor | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Rows of group g are `counts[g]`, of sequence g mod 3; `visible` of all rows, one after the other."""
    from whalepod.kernels.packed_index_scores import gluon_kernel

    generator = torch.Generator("cuda").manual_seed(3)
    rows, blocks = len(visible), -(-entries // BLOCK)
    pool = MXFP4_BLOCK32.encode(torch.randn(SEQUENCES * blocks * BLOCK, 128, device="cuda", generator=generator))
    firsts = [sum(counts[:group]) for group in range(len(counts))]
    groups = [
        [first, count, group % SEQUENCES] for group, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ]
    given: dict[str, Any] = {
        "queries": MXFP4_BLOCK32.round_trip(
            torch.randn(rows, heads, 128, device="cuda", generator=generator).bfloat16()
        ),
        "weights": torch.randn(rows, heads, device="cuda", generator=generator),
        "keys": pool if keys is None else keys,
        "tables": torch.randperm(SEQUENCES * blocks, device="cuda", generator=generator).int().view(SEQUENCES, blocks),
        "visible": torch.tensor(visible, dtype=torch.int32, device="cuda"),
        "groups": torch.tensor(groups, dtype=torch.int32, device="cuda").t().contiguous(),
        "entries_per_block": BLOCK,
        "entries_max": entries,
    }
    expected = reference.packed_index_scores(**given)
    shown = torch.arange(entries, device="cuda") < given["visible"][:, None]
    out = gluon_kernel.packed_index_scores(**given, group_rows=max(counts))[shown]
    assert (out - expected[shown]).norm() <= tolerance * expected[shown].norm()
    assert torch.equal(out, gluon_kernel.packed_index_scores(**given, group_rows=max(counts))[shown])
    # A score's bits do not depend on the rows that it is computed with.
    alone = [[first + row, 1, sequence] for first, count, sequence in groups for row in range(count)]
    given["groups"] = torch.tensor(alone, dtype=torch.int32, device="cuda").t().contiguous()
    assert torch.equal(out, gluon_kernel.packed_index_scores(**given, group_rows=1)[shown])


@pytest.mark.parametrize("largest", range(1, 9))
def test_groups_of_every_size_match(largest: int) -> None:
    counts = [1 + group % largest for group in range(7)] + [largest]
    check(counts, [900 + row for row in range(sum(counts))], 1000)


def test_visible_entries_that_end_around_a_tile_match_and_those_of_none_write_nothing_that_is_read() -> None:
    check([3, 3, 2], [63, 64, 65, 0, 1, 2, 0, 0], 128)


def test_scores_that_are_no_multiple_of_a_tile_long_match() -> None:
    check([2, 1], [33, 33, 20], 33)


def test_many_tiles_a_program_match() -> None:
    check([6] * 200, [7000 + row for row in range(1200)], 8500)


@pytest.mark.parametrize("heads", [16, 64])
def test_other_numbers_of_heads_match(heads: int) -> None:
    check([3, 1], [499, 500, 501, 777], 800, heads=heads)


def test_keys_whose_groups_differ_by_two_to_the_eleven_are_as_good_as_the_matrix_units_sums() -> None:
    """Their FP8 sums keep some 14 bits below the largest product, so the smallest group loses its last bits."""
    generator = torch.Generator("cuda").manual_seed(4)
    keys = torch.randint(0, 256, (SEQUENCES * 96, 68), device="cuda", generator=generator, dtype=torch.uint8)
    keys[:, 64:] = torch.tensor([127, 116, 122, 119], device="cuda")
    check([2], [92, 92], 92, keys=keys, tolerance=3e-4)


def test_keys_of_zeros_score_zero() -> None:
    check([1], [92], 92, keys=MXFP4_BLOCK32.encode(torch.zeros(SEQUENCES * 96, 128, device="cuda")))
