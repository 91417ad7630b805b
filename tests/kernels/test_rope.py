from __future__ import annotations

import pytest
import torch

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.rope import rotary_angles, rotary_factors, rotate

pytestmark = pytest.mark.usefixtures("arithmetic")

FREQUENCIES = torch.tensor([1.0, 0.1, 1e-3])


def test_channel_pairs_turn_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 7, 1_000_000])
    x = seeded(3, 2, 8)
    factors = rotary_factors(*rotary_angles(positions, FREQUENCIES), 8)
    turned = rotate(x, *factors)
    assert torch.equal(turned[..., :2], x[..., :2]), "channels in front of the rotary ones stay"
    angles = positions[:, None].float() * FREQUENCIES
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    wanted = torch.view_as_real(torch.view_as_complex(x[..., 2:].unflatten(-1, (-1, 2)).contiguous()) * turns)
    torch.testing.assert_close(turned[..., 2:], wanted.flatten(-2))


def test_negated_neighbour_factors_turn_back() -> None:
    own, neighbour = rotary_factors(*rotary_angles(torch.arange(5), FREQUENCIES), 8)
    x = seeded(5, 8)
    torch.testing.assert_close(rotate(rotate(x, own, neighbour), own, -neighbour), x)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    positions = torch.arange(64) * 977

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, *rotary_factors(*rotary_angles(positions, FREQUENCIES), 9 - 1))

    assert rows_that_differ(turn, seeded(64, 3, 8), positions) == 0
