"""Packed formats in plain torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import narrow

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 is the sign."""


def encode(x: Tensor, *, four_bits: bool, power: bool, group: int, amax_min: float) -> Tensor:
    """x [..., width] -> codes, then scales [..., bytes]. `four_bits`: E2M1 and not E4M3 codes; `power`: scales are
    powers of two and not E4M3 (`PackedFormat`)."""
    grouped = narrow(x, torch.float32).unflatten(-1, (-1, group))
    limit = E2M1_MAX if four_bits else E4M3_MAX
    target = grouped.abs().amax(dim=-1).clamp_(min=amax_min).div_(limit)
    scale_bytes = _power_of_two_bytes(target) if power else _e4m3_bytes(target.clamp_(max=E4M3_MAX))
    scaled = (grouped / _scale_values(scale_bytes, power).unsqueeze(-1)).clamp_(-limit, limit).flatten(-2)
    codes = _pack_e2m1(scaled) if four_bits else _e4m3_bytes(scaled)
    return torch.cat((codes, scale_bytes), dim=-1)


def decode(records: Tensor, width: int, dtype: torch.dtype, *, four_bits: bool, power: bool, group: int) -> Tensor:
    """records [..., bytes] -> [..., width] in `dtype`."""
    split = width // 2 if four_bits else width
    scales = _scale_values(records[..., split:].contiguous(), power)
    codes = records[..., :split].contiguous()
    values = _unpack_e2m1(codes) if four_bits else codes.view(torch.float8_e4m3fn).float()
    return narrow((values.unflatten(-1, (-1, group)) * scales.unsqueeze(-1)).flatten(-2), dtype)


def _scale_values(scale_bytes: Tensor, power: bool) -> Tensor:
    return scale_bytes.view(torch.float8_e8m0fnu if power else torch.float8_e4m3fn).float()


def _power_of_two_bytes(target: Tensor) -> Tensor:
    """E8M0 bytes of the smallest powers of two >= target, normal float32: its exponent bits, one more unless the
    mantissa bits are all 0. An exact power stays exact."""
    return (target.view(torch.int32) + 0x7FFFFF >> 23).to(torch.uint8)


def _e4m3_bytes(values: Tensor) -> Tensor:
    """`values` within the range of E4M3."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


@cache
def _e2m1_bounds(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The largest magnitudes that still round to codes 0 to 6. A middle belongs to the even one of its two codes."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = torch.nextafter(middles, torch.zeros_like(middles))
    odd = torch.arange(len(middles), device=device) % 2 == 1
    return torch.where(odd, below, middles)


def _pack_e2m1(values: Tensor) -> Tensor:
    bounds = _e2m1_bounds(values.dtype, values.device)
    codes = torch.bucketize(values.abs(), bounds, out_int32=True) | (torch.signbit(values).int() << 3)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: the two values of every byte."""
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)
    return torch.stack((signed.repeat(16), signed.repeat_interleave(16)), dim=-1)


def _unpack_e2m1(codes: Tensor) -> Tensor:
    # Three times as fast as indexing with `codes`.
    return functional.embedding(codes.int(), _e2m1_pairs(codes.device)).flatten(-2)
