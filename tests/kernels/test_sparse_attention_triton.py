"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32
from whalepod.kernels.sparse_attention import reference, sparse_attention, triton_kernel

RING, WINDOW = 20, 16
# Weights and the result are rounded to bfloat16, each by up to 2^-9 of itself.
TOLERANCE = 6e-3


def problem(heads: int = 8, width: int = 64, chosen: int = 32, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor([0, 3, 37, 40, 1000], dtype=torch.int32)
    rows = len(positions)
    picked = torch.full((rows, chosen), -1, dtype=torch.int32)
    for row, count in enumerate((0, 1, 17, chosen, chosen - 1)):
        picked[row, :count] = torch.randperm(50, generator=generator)[:count].sort().values
    angles = torch.rand(rows, width // 8, generator=generator) * 6
    return {
        "queries": torch.randn(rows, heads, width, generator=generator).bfloat16(),
        "window": FP8_BLOCK32.encode(torch.randn(3 * RING, width, generator=generator)),
        "bases": torch.tensor([0, 0, RING, RING, 2 * RING], dtype=torch.int32),
        "positions": positions,
        "lowest": torch.tensor([0, 0, 0, 30, 1000], dtype=torch.int32),
        "sink": torch.randn(heads, generator=generator),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "ring": RING,
        "window_rows": WINDOW,
        "scale": width**-0.5,
        "entries": FP4_BLOCK16.encode(torch.randn(50, width, generator=generator)),
        "chosen": picked,
    }


def assert_matches(given: dict[str, Any], **sizes: int) -> None:
    with forced("sparse_attention", KEYS=16, **sizes):
        out = triton_kernel.sparse_attention(**given)
    expected = reference.sparse_attention(**(given | {"queries": given["queries"].float()}))
    assert out.dtype == torch.bfloat16 and out.shape == given["queries"].shape
    assert (out.float() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_with_full_short_and_no_selection_match_whatever_the_parts(parts: int) -> None:
    assert_matches(problem(), PARTS=parts)


@pytest.mark.parametrize("heads", [1, 20])
def test_numbers_of_heads_that_fill_no_tile_match(heads: int) -> None:
    assert_matches(problem(heads=heads))


@pytest.mark.parametrize("parts", [1, 2])
def test_heads_may_be_shared_out_among_programs(parts: int) -> None:
    assert_matches(problem(heads=40), HEAD_BLOCK=16, PARTS=parts)


def test_window_alone_matches() -> None:
    assert_matches(problem() | {"entries": None, "chosen": None})


def test_codes_that_are_subnormal_and_signed_zeros_decode_exactly() -> None:
    given, generator = problem(), torch.Generator().manual_seed(9)
    given["window"] = torch.randint(0, 256, (3 * RING, 66), dtype=torch.uint8, generator=generator)
    given["window"][:, :64] = torch.where(given["window"][:, :64] & 127 == 127, 7, given["window"][:, :64])
    given["window"][:, 64:] = 115
    given["entries"] = torch.randint(0, 256, (50, 36), dtype=torch.uint8, generator=generator)
    given["entries"][:, 32:] = torch.randint(0, 64, (50, 4), dtype=torch.uint8, generator=generator)
    assert_matches(given)


def test_without_keys_and_with_no_sink_the_output_is_zero() -> None:
    given = problem()
    given["lowest"] = given["positions"] + 1
    given["chosen"] = torch.full_like(given["chosen"], -1)
    given["sink"] = torch.full_like(given["sink"], -torch.inf)
    assert not triton_kernel.sparse_attention(**given).any()


def test_no_rows_give_no_rows() -> None:
    given = {name: value[:0] if name in PER_ROW else value for name, value in problem().items()}
    assert triton_kernel.sparse_attention(**given).shape == (0, 8, 64)


def test_queries_that_are_not_contiguous_match() -> None:
    given = problem()
    given["queries"] = given["queries"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not given["queries"].is_contiguous()
    assert_matches(given)


def test_a_row_has_the_same_bits_alone_and_among_others_when_batch_invariant() -> None:
    given = problem()
    alone = {name: value[3:4] if name in PER_ROW else value for name, value in given.items()}
    with forced("sparse_attention", KEYS=16):
        together = triton_kernel.sparse_attention(**given, batch_invariant=True)
        assert torch.equal(together[3:4], triton_kernel.sparse_attention(**alone, batch_invariant=True))


def test_the_entry_point_takes_the_reference_for_cpu_tensors() -> None:
    given = problem()
    given["queries"] = given["queries"].float()
    assert torch.equal(sparse_attention(**given), reference.sparse_attention(**given))


PER_ROW = ("queries", "bases", "positions", "lowest", "cos", "sin", "chosen")
