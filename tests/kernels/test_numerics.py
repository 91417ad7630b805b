"""Tiles: fixed, or as large as the batch, as the thread was told."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.attention import sink_attention
from whalepod.kernels.experts import expert_outputs, routed_experts
from whalepod.kernels.indexer import index_scores
from whalepod.kernels.linear import grouped_linear, linear
from whalepod.kernels.numerics import ROW_TILE, pad_rows, tile_rows, whole_batches

pytestmark = pytest.mark.usefixtures("arithmetic")

WEIGHT, GROUPED = seeded(48, 64, seed=1), seeded(2, 24, 32, seed=2)
GATE_UP, DOWN = seeded(6, 64, 64, seed=3), seeded(6, 64, 32, seed=4)
KEYS, INDEX_KEYS, SINK = seeded(64, 20, 32, seed=5), seeded(150, 16, seed=6), seeded(2, seed=7)
VALID = seeded(64, 20, seed=8) > -1
IDS = torch.stack([seeded(6, seed=row).argsort()[:2] for row in range(64)])


def _experts(x: Tensor) -> Tensor:
    return routed_experts(x, IDS[: len(x)], torch.full((len(x), 2), 0.5), GATE_UP, DOWN, limit=2.0)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: linear(x, WEIGHT),
    "grouped linear": lambda x: grouped_linear(x.unflatten(1, (2, 32)), GROUPED),
    "experts": _experts,
    "attention": lambda x: sink_attention(
        x.unflatten(1, (2, 32)), KEYS[: len(x)], VALID[: len(x)], SINK, scale=0.2
    ).flatten(1),
    "index scores": lambda x: index_scores(x.unflatten(1, (4, 16)), x[:, :4], INDEX_KEYS),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [0, 1, 8, 33])
def test_whole_batches_give_the_same_but_for_rounding(name: str, rows: int) -> None:
    x = seeded(rows, 64)
    tiled = KERNELS[name](x)
    with whole_batches():
        torch.testing.assert_close(KERNELS[name](x), tiled, atol=1e-5, rtol=1e-5)


def test_whole_batches_end_where_they_are_left_also_by_an_error() -> None:
    with whole_batches():
        assert tile_rows(100) == 100
        with whole_batches(False):
            assert tile_rows(100) == ROW_TILE
        assert tile_rows(100) == 100
    with pytest.raises(RuntimeError, match="in between"), whole_batches():
        raise RuntimeError("in between")
    assert tile_rows(100) == ROW_TILE


def test_another_thread_is_not_concerned() -> None:
    seen: list[int] = []
    with whole_batches():
        thread = threading.Thread(target=lambda: seen.append(tile_rows(100)))
        thread.start()
        thread.join()
    assert seen == [ROW_TILE]


def test_whole_batches_are_not_padded() -> None:
    x = seeded(3, 8)
    assert pad_rows(x).shape == (ROW_TILE, 8)
    with whole_batches():
        assert pad_rows(x) is x


def test_experts_of_other_ranks_are_computed_in_tiles_all_the_same() -> None:
    experts = IDS[:, 0]
    with whole_batches():
        run = lambda x, experts: expert_outputs(  # noqa: E731
            x, torch.arange(len(x)), experts, GATE_UP, DOWN, limit=2.0
        )
        assert rows_that_differ(run, seeded(64, 64), experts) == 0
