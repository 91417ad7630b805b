"""Stored number formats: decoding equals the reference bit for bit, and what we encode decodes to the nearest value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from whalepod.model.weight_formats import (
    E2M1_VALUES,
    decode_fp8_blocks,
    decode_fp8_rows,
    decode_mxfp4,
    encode_fp8_blocks,
    encode_fp8_rows,
    encode_mxfp4,
    scale_values,
)

UNITS = load_file(Path(__file__).parents[1] / "golden" / "units.safetensors")


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def test_fp8_blocks_decode_as_the_reference_does() -> None:
    decoded = decode_fp8_blocks(UNITS["wq.fp8_32x32.codes"], UNITS["wq.fp8_32x32.scale"], (32, 32))
    assert torch.equal(decoded, UNITS["wq.fp8_32x32.dequant"])


def test_mxfp4_decodes_as_the_reference_does() -> None:
    decoded = decode_mxfp4(UNITS["wq.mxfp4.packed"], UNITS["wq.mxfp4.scale"])
    assert torch.equal(decoded, UNITS["wq.mxfp4.dequant"])


def test_both_encoders_give_the_reference_codes() -> None:
    codes, scales = encode_fp8_blocks(UNITS["wq.float32"], (32, 32))
    assert torch.equal(codes.view(torch.uint8), UNITS["wq.fp8_32x32.codes"])
    assert torch.equal(scales, UNITS["wq.fp8_32x32.scale"])
    packed, scales = encode_mxfp4(UNITS["wq.float32"])
    assert torch.equal(packed.view(torch.uint8), UNITS["wq.mxfp4.packed"])
    assert torch.equal(scales, UNITS["wq.mxfp4.scale"])


def test_scale_bytes_are_powers_of_two_from_end_to_end() -> None:
    values = scale_values(torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8))
    assert values[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert values[6].isnan()


def test_the_even_column_lies_in_the_low_nibble() -> None:
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8).view(torch.int8)
    decoded = decode_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8))
    assert decoded[0, :3].tolist() == [0.5, 1.0, 0.0]


def test_rows_carry_one_scale_for_32_channels() -> None:
    codes, scales = encode_fp8_rows(torch.cat([torch.full((1, 32), 448.0), torch.full((1, 32), 3.5)], dim=1))
    assert scales.tolist() == [[127, 127 - 7]]
    assert torch.equal(decode_fp8_rows(codes, scales), torch.tensor([[448.0] * 32 + [3.5] * 32]))


@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (31, 31), (80, 96)])
def test_fp8_blocks_of_any_shape_come_back_within_a_rounding_step(shape: tuple[int, int]) -> None:
    values = random_matrix(*shape)
    codes, scales = encode_fp8_blocks(values, (32, 32))
    assert codes.shape == values.shape
    decoded = decode_fp8_blocks(codes, scales, (32, 32))
    # E4M3 keeps 4 significant bits; below its smallest normal number the step is 2^-9 of the scale.
    spread = scale_values(scales).repeat_interleave(32, 0)[: shape[0]].repeat_interleave(32, 1)[:, : shape[1]]
    assert ((decoded - values).abs() <= torch.maximum(values.abs() * 2**-4, spread * 2**-10)).all()


def test_encoding_what_was_decoded_changes_nothing() -> None:
    values = random_matrix(64, 64)
    blocks = encode_fp8_blocks(values, (32, 32))
    again = encode_fp8_blocks(decode_fp8_blocks(*blocks, (32, 32)), (32, 32))
    assert torch.equal(decode_fp8_blocks(*again, (32, 32)), decode_fp8_blocks(*blocks, (32, 32)))
    packed = encode_mxfp4(values)
    again = encode_mxfp4(decode_mxfp4(*packed))
    assert torch.equal(decode_mxfp4(*again), decode_mxfp4(*packed))


def test_fp4_rounds_to_the_nearest_code_and_ties_to_the_even_one() -> None:
    # A 6 fixes the scale of the row at 1.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([[6.0, *ties, *(-tie for tie in ties), -0.0, *[0.0] * 16]])
    decoded = decode_mxfp4(*encode_mxfp4(row))[0].tolist()
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert decoded[:16] == [6.0, *even, *(-value for value in even), 0.0]
    assert torch.signbit(decode_mxfp4(*encode_mxfp4(row)))[0, 15]
    fine = torch.linspace(-6, 6, 32 * 64).view(64, 32)
    fine[:, 0] = 6.0
    codes = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    nearest = (fine.unsqueeze(-1) - codes).abs().amin(-1)
    assert torch.equal((decode_mxfp4(*encode_mxfp4(fine)) - fine).abs(), nearest)


def test_zeros_stay_zero() -> None:
    zeros = torch.zeros(32, 32)
    assert torch.equal(decode_mxfp4(*encode_mxfp4(zeros)), zeros)
    assert torch.equal(decode_fp8_rows(*encode_fp8_rows(zeros)), zeros)
