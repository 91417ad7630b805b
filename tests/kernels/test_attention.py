from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.attention import sink_attention

pytestmark = pytest.mark.usefixtures("arithmetic")

HEADS, WIDTH, KEYS = 3, 16, 21
SINK = seeded(HEADS, seed=9)


def by_definition(queries: Tensor, keys: Tensor, valid: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(queries, dtype=torch.float64)
    for row in range(queries.shape[0]):
        own = keys[row][valid[row]].double()
        weights = torch.exp(scale * queries[row].double() @ own.t())
        out[row] = weights @ own / (weights.sum(dim=1, keepdim=True) + torch.exp(SINK.double())[:, None])
    return out.to(queries.dtype)


def attend(queries: Tensor, keys: Tensor, valid: Tensor) -> Tensor:
    return sink_attention(queries, keys, valid, SINK, scale=0.25)


def some_valid(rows: int) -> Tensor:
    return seeded(rows, KEYS, seed=5) > 0


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 20])
def test_rows_attend_to_their_valid_keys_and_the_sink(rows: int) -> None:
    queries, keys, valid = seeded(rows, HEADS, WIDTH), seeded(rows, KEYS, WIDTH, seed=1), some_valid(rows)
    torch.testing.assert_close(attend(queries, keys, valid), by_definition(queries, keys, valid, 0.25))


def test_a_row_without_keys_is_zero() -> None:
    out = attend(seeded(2, HEADS, WIDTH), seeded(2, KEYS, WIDTH), torch.zeros(2, KEYS, dtype=torch.bool))
    assert torch.equal(out, torch.zeros(2, HEADS, WIDTH))


def test_large_scores_do_not_overflow() -> None:
    queries, keys = seeded(1, HEADS, WIDTH) * 1e3, seeded(1, KEYS, WIDTH) * 1e3
    assert bool(torch.isfinite(attend(queries, keys, torch.ones(1, KEYS, dtype=torch.bool))).all())


def test_keys_that_are_not_valid_change_no_bit() -> None:
    queries, keys, valid = seeded(9, HEADS, WIDTH), seeded(9, KEYS, WIDTH, seed=1), some_valid(9)
    others = torch.where(valid[:, :, None], keys, seeded(9, KEYS, WIDTH, seed=2) * 100)
    assert torch.equal(attend(queries, keys, valid), attend(queries, others, valid))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    inputs = seeded(64, HEADS, WIDTH), seeded(64, KEYS, WIDTH, seed=1), some_valid(64)
    assert rows_that_differ(attend, *inputs) == 0


def test_no_rows_give_no_rows() -> None:
    assert attend(seeded(0, HEADS, WIDTH), seeded(0, KEYS, WIDTH), some_valid(0)).shape == (0, HEADS, WIDTH)
