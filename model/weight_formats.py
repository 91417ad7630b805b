"""The number formats of stored weights, both ways: E4M3 blocks, packed E2M1 rows, E4M3 rows; scales are powers of two.

A scale is one E8M0 byte s and means 2^(s - 127); s = 255 is NaN. Scales are handled as bytes: a numeric conversion of
E8M0 to integers would destroy them. Values decoded here are exact in float32, and in bfloat16 within its range.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP4_GROUP = 32
"""Input channels that share a scale in packed experts and in n-gram rows."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0..7; bit 3 is the sign."""


def scale_values(scales: Tensor) -> Tensor:
    """E8M0 scales, as uint8 or float8_e8m0fnu, as float32 powers of two of the same shape."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def decode_fp8_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """codes [out, in] E4M3, scales [ceil(out / block[0]), ceil(in / block[1])] E8M0 -> float32 [out, in]."""
    rows, columns = codes.shape
    spread = scale_values(scales).repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return _e4m3(codes) * spread


def decode_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [rows, width] E4M3, scales [rows, groups] E8M0, each for width / groups channels -> float32."""
    rows, groups = scales.shape
    grouped = _e4m3(codes).view(rows, groups, -1) * scale_values(scales).unsqueeze(-1)
    return grouped.view(rows, -1)


def decode_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """packed [out, in / 2] bytes, even column in the low nibble, scales [out, in / 32] E8M0 -> float32 [out, in]."""
    codes = packed.view(torch.uint8)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(codes.shape[0], -1)
    signed = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), dtype=torch.float32, device=codes.device)
    return signed[nibbles.long()] * scale_values(scales).repeat_interleave(FP4_GROUP, -1)


def encode_fp8_blocks(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """float32 [out, in] -> E4M3 codes of the same shape, and per block the smallest E8M0 scale that fits."""
    rows, columns = values.shape
    padded = torch.zeros(-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1])
    padded[:rows, :columns] = values
    tiles = padded.view(padded.shape[0] // block[0], block[0], -1, block[1])
    scales = _scales_for(tiles.abs().amax(dim=(1, 3)), E4M3_MAX)
    spread = scale_values(scales)[:, None, :, None]
    codes = (tiles / spread).clamp(-E4M3_MAX, E4M3_MAX).view(padded.shape)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


def encode_fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [rows, width] -> E4M3 codes and E8M0 scales [rows, width / 32]."""
    groups = values.view(values.shape[0], -1, FP4_GROUP)
    scales = _scales_for(groups.abs().amax(dim=-1), E4M3_MAX)
    codes = (groups / scale_values(scales).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return codes.view(values.shape).to(torch.float8_e4m3fn), scales


def encode_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [out, in] -> int8 [out, in / 2] with two E2M1 codes a byte, and E8M0 scales [out, in / 32]."""
    groups = values.view(values.shape[0], -1, FP4_GROUP)
    scales = _scales_for(groups.abs().amax(dim=-1), E2M1_MAX)
    codes = _e2m1_codes((groups / scale_values(scales).unsqueeze(-1)).view(values.shape))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.view(torch.int8), scales


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _scales_for(amax: Tensor, limit: float) -> Tensor:
    """Smallest E8M0 scales (uint8) with amax / scale <= limit. frexp reads exponent bits: exact powers stay exact."""
    mantissa, exponent = torch.frexp(amax.clamp(min=2.0**-100) / limit)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (exponent + 127).to(torch.uint8)


def _e2m1_codes(values: Tensor) -> Tensor:
    """Nearest E2M1 codes, ties to the even code; the sign of zero is kept. uint8, same shape."""
    magnitudes = torch.tensor(E2M1_VALUES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs().contiguous()
    lower = torch.bucketize(size, middles)
    # On a middle, bucketize stays below; the code above is the even one if the code below is odd.
    tie = (lower < len(middles)) & (size == middles[lower.clamp(max=len(middles) - 1)])
    codes = torch.where(tie & (lower % 2 == 1), lower + 1, lower)
    return (codes | torch.signbit(values).long() << 3).to(torch.uint8)
