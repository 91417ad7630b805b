from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat

pytestmark = pytest.mark.usefixtures("arithmetic")

FORMATS = [FP8_BLOCK32, FP4_BLOCK16, MXFP4_BLOCK32]
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_released_records_have_the_published_sizes() -> None:
    assert FP8_BLOCK32.record_bytes(512) == 528
    assert FP4_BLOCK16.record_bytes(512) == 288
    assert MXFP4_BLOCK32.record_bytes(128) == 68


@pytest.mark.parametrize("packed", FORMATS)
def test_a_width_that_does_not_fill_groups_is_refused(packed: PackedFormat) -> None:
    with pytest.raises(ValueError, match="group"):
        packed.record_bytes(40)


@pytest.mark.parametrize("packed", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 64), (3, 2, 32)])
def test_records_take_any_leading_shape(packed: PackedFormat, shape: tuple[int, ...]) -> None:
    x = seeded(*shape)
    records = packed.encode(x)
    assert records.shape == (*shape[:-1], packed.record_bytes(shape[-1]))
    assert packed.decode(records, shape[-1], torch.float64).shape == shape


@pytest.mark.parametrize("packed", [FP8_BLOCK32, MXFP4_BLOCK32])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 500.0])
def test_a_stored_row_is_stored_again_without_loss(packed: PackedFormat, magnitude: float) -> None:
    once = packed.round_trip(seeded(20, 64) * magnitude)
    assert torch.equal(packed.round_trip(once), once)


def test_fp4_rounds_to_nearest_and_ties_to_the_even_code() -> None:
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    values = torch.zeros(1, 32)
    values[0, :7], values[0, 7:14], values[0, 31] = middles, -middles, 6.0
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    stored = MXFP4_BLOCK32.round_trip(values)[0]
    assert torch.equal(stored[:7], even)
    assert torch.equal(stored[7:14], -even)


def test_the_even_channel_is_in_the_low_nibble() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 1.0, -6.0
    assert int(MXFP4_BLOCK32.encode(x)[0, 0]) == 0x2 | 0xF << 4


@pytest.mark.parametrize(("packed", "limit"), [(FP8_BLOCK32, 448.0), (MXFP4_BLOCK32, 6.0)])
def test_a_power_of_two_scale_does_not_grow_at_an_exact_boundary(packed: PackedFormat, limit: float) -> None:
    """The scale is the smallest power of two that keeps the group in range."""
    for exponent in (-3, 0, 5):
        x = torch.zeros(2, 32)
        x[0, 3] = limit * 2.0**exponent
        x[1, 3] = torch.nextafter(x[0, 3], torch.tensor(torch.inf))
        scales = packed.encode(x)[:, -1].tolist()
        assert scales == [127 + exponent, 128 + exponent]


@pytest.mark.parametrize("packed", FORMATS)
def test_tiny_and_zero_groups_stay_finite(packed: PackedFormat) -> None:
    x = torch.cat((torch.zeros(1, 32), torch.full((1, 32), 1e-30)))
    assert bool(torch.isfinite(packed.round_trip(x)).all())
    assert torch.equal(packed.decode(torch.zeros_like(packed.encode(x)), 32, torch.float32), torch.zeros(2, 32))


def test_a_group_too_large_for_its_scale_saturates() -> None:
    stored = FP4_BLOCK16.round_trip(torch.full((1, 16), 1e6))
    assert torch.equal(stored, torch.full((1, 16), 6 * 448.0))


@pytest.mark.parametrize("packed", FORMATS)
def test_a_row_has_the_same_bytes_in_any_batch(packed: PackedFormat) -> None:
    def encode(x: Tensor) -> Tensor:
        return packed.encode(x)

    assert rows_that_differ(encode, seeded(64, 96)) == 0
