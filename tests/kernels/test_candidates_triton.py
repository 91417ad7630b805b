"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.candidates import candidate_blocks, candidate_scores, entry_places, reference, triton_kernel
from whalepod.kernels.indexer import candidate_mask
from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.packed_index_scores.any_width_kernel import any_width_scores
from whalepod.kernels.quantise import MXFP4_BLOCK32

BLOCK, PER_BLOCK, TOP = 8, 32, 4


def world(width: int, heads: int = 8) -> dict[str, torch.Tensor]:
    """Rows of two sequences whose blocks of the pool are in no order."""
    generator = torch.Generator().manual_seed(width)
    rows = 5
    queries = MXFP4_BLOCK32.round_trip(torch.randn(rows, heads, width, generator=generator).bfloat16())
    return {
        "queries": queries,
        "weights": torch.randn(rows, heads, generator=generator),
        "keys": MXFP4_BLOCK32.encode(torch.randn(8 * PER_BLOCK, width, generator=generator)),
        "tables": torch.randperm(8, generator=generator).int().view(2, 4),
        "segments": torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32),
        "visible": torch.tensor([0, 1, 77, 78, 128], dtype=torch.int32),
    }


def blocks_of(visible: torch.Tensor) -> torch.Tensor:
    scores = torch.randn(len(visible), 128, generator=torch.Generator().manual_seed(4))
    return candidate_blocks(scores, visible, block=BLOCK, top_blocks=TOP)


def test_blocks_are_those_of_the_mask() -> None:
    visible = world(32)["visible"]
    scores = torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    mask = candidate_mask(scores, visible.long(), block=BLOCK, top_blocks=TOP)
    for row, blocks in enumerate(candidate_blocks(scores, visible, block=BLOCK, top_blocks=TOP)):
        assert blocks[blocks >= 0].tolist() == mask[row, ::BLOCK].nonzero().flatten().tolist()


@pytest.mark.parametrize("entries", [1, 8, 100, 128])
def test_maxima_match(entries: int) -> None:
    scores = torch.randn(5, entries, generator=torch.Generator().manual_seed(4))
    visible = torch.tensor([0, 1, 5, entries - 1, entries], dtype=torch.int32).clamp(max=entries)
    ours = triton_kernel.block_maxima(scores, visible, block=BLOCK)
    assert torch.equal(ours, reference.block_maxima(scores, visible, block=BLOCK))


def test_scores_of_candidates_match() -> None:
    given = world(128)
    blocks = blocks_of(given["visible"])
    sizes: dict[str, Any] = {"block": BLOCK, "entries_per_block": PER_BLOCK}
    with forced("candidate_scores", KEYS=16, TILES=1):
        ours = triton_kernel.candidate_scores(**given, blocks=blocks, **sizes)
    wanted, seen = candidate_scores(**given, blocks=blocks, **sizes)
    assert torch.equal(triton_kernel.seen_candidates(blocks, given["visible"], block=BLOCK), seen)
    assert seen.tolist()[:2] == [0, 1] and seen.max() == TOP * BLOCK
    there = torch.arange(TOP * BLOCK) < seen[:, None]
    torch.testing.assert_close(ours[there], wanted[there], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [32, 64])
def test_scores_of_keys_of_any_width_match(width: int) -> None:
    given = world(width)
    blocks = blocks_of(given["visible"])
    wanted, seen = candidate_scores(**given, blocks=blocks, block=BLOCK, entries_per_block=PER_BLOCK)
    ours = any_width_scores(**given, blocks=blocks, block=BLOCK, entries_per_block=PER_BLOCK, total=TOP * BLOCK)
    there = torch.arange(TOP * BLOCK) < seen[:, None]
    torch.testing.assert_close(ours[there], wanted[there], rtol=1e-5, atol=1e-5)
    every = torch.arange(128 // BLOCK, dtype=torch.int32).repeat(5, 1)
    whole = any_width_scores(**given, blocks=None, block=1, entries_per_block=PER_BLOCK, total=128)
    wanted, _ = candidate_scores(**given, blocks=every, block=BLOCK, entries_per_block=PER_BLOCK)
    there = torch.arange(128) < given["visible"][:, None]
    torch.testing.assert_close(whole[there], wanted[there], rtol=1e-5, atol=1e-5)
    assert (whole[~there] == -torch.inf).all()


@pytest.mark.parametrize("restricted", [False, True])
def test_places_match(restricted: bool) -> None:
    given = world(32)
    blocks = blocks_of(given["visible"])
    chosen = torch.tensor([[-1, -1, -1], [0, -1, -1], [0, 5, 31], [3, 9, -1], [1, 30, 31]], dtype=torch.int32)
    arguments = (chosen, given["tables"], given["segments"], blocks if restricted else None)
    sizes: dict[str, Any] = {"block": BLOCK, "entries_per_block": PER_BLOCK}
    ours, wanted = triton_kernel.entry_places(*arguments, **sizes), entry_places(*arguments, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
