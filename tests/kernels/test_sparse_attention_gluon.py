"""The Hopper kernel against the reference: it has no interpreter, so these need the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32
from whalepod.kernels.sparse_attention import reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an H100 or H200")

RING, WINDOW, HEADS, WIDTH, CHOSEN = 140, 128, 64, 512, 512


def problem(counts: list[int], positions: list[int]) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = len(positions)
    picked = torch.full((rows, CHOSEN), -1, dtype=torch.int32, device="cuda")
    for row, count in enumerate(counts):
        picked[row, :count] = torch.randperm(1000, device="cuda", generator=generator)[:count].int()
    at = torch.tensor(positions, dtype=torch.int32, device="cuda")
    angles = torch.rand(rows, 32, device="cuda", generator=generator) * 6
    return {
        "queries": torch.randn(rows, HEADS, WIDTH, device="cuda", generator=generator).bfloat16(),
        "window": FP8_BLOCK32.encode(torch.randn(rows * RING, WIDTH, device="cuda", generator=generator)),
        "bases": torch.arange(rows, device="cuda").int() * RING,
        "positions": at,
        "lowest": (at - 200).clamp(min=0),
        "sink": torch.randn(HEADS, device="cuda", generator=generator),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "ring": RING,
        "window_rows": WINDOW,
        "scale": WIDTH**-0.5,
        "entries": FP4_BLOCK16.encode(torch.randn(1000, WIDTH, device="cuda", generator=generator)),
        "chosen": picked,
    }


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_length_of_window_and_selection_matches_and_repeats_its_bits(parts: int) -> None:
    from whalepod.kernels.sparse_attention import gluon_kernel

    counts, positions = [0, 1, 63, 64, 65, 511, 512, 0], [0, 62, 63, 64, 127, 128, 70_000, 500]
    given = problem(counts * 40, positions * 40)
    with forced("sparse_attention_hopper", PARTS=parts):
        out, again = (gluon_kernel.sparse_attention(**given) for _ in range(2))
    expected = reference.sparse_attention(**(given | {"queries": given["queries"].float()}))
    assert (out.float() - expected).norm() <= 4e-3 * expected.norm()
    assert torch.equal(out, again)
