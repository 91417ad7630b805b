"""Packed formats in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import narrow

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0 to 7; bit 3 is the sign."""


class Element(Enum):
    E4M3 = "e4m3"
    E2M1 = "e2m1"


class Scale(Enum):
    POWER_OF_TWO = "ue8m0"
    """One byte s, meaning 2^(s - 127): the smallest power of two that keeps the group within range."""
    E4M3 = "e4m3"
    """amax / range, rounded to E4M3."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Groups of `group` channels that share a scale. `amax_min` is the least magnitude a group is scaled for."""

    element: Element
    scale: Scale
    group: int
    amax_min: float

    def record_bytes(self, width: int) -> int:
        """Bytes of a record of `width` channels. Raises ValueError if they do not fill whole groups."""
        if width % self.group:
            raise ValueError(f"{width} channels are no multiple of the format's group of {self.group}")
        return self._code_bytes(width) + width // self.group

    def encode(self, x: Tensor) -> Tensor:
        """x [..., width] float -> records [..., record_bytes] uint8."""
        grouped = narrow(x, torch.float32).unflatten(-1, (-1, self.group))
        limit = E4M3_MAX if self.element is Element.E4M3 else E2M1_MAX
        target = grouped.abs().amax(dim=-1).clamp_(min=self.amax_min).div_(limit)
        power = self.scale is Scale.POWER_OF_TWO
        scale_bytes = _power_of_two_bytes(target) if power else _e4m3_bytes(target.clamp_(max=E4M3_MAX))
        scaled = (grouped / self._scale_values(scale_bytes).unsqueeze(-1)).clamp_(-limit, limit).flatten(-2)
        codes = _e4m3_bytes(scaled) if self.element is Element.E4M3 else _pack_e2m1(scaled)
        return torch.cat((codes, scale_bytes), dim=-1)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """records [..., record_bytes] uint8 -> [..., width] in `dtype`; exact in bfloat16 and wider."""
        split = self._code_bytes(width)
        scales = self._scale_values(records[..., split:].contiguous())
        codes = records[..., :split].contiguous()
        values = codes.view(torch.float8_e4m3fn).float() if self.element is Element.E4M3 else _unpack_e2m1(codes)
        return narrow((values.unflatten(-1, (-1, self.group)) * scales.unsqueeze(-1)).flatten(-2), dtype)

    def round_trip(self, x: Tensor) -> Tensor:
        """The values that a record of x would hold, in the dtype of x."""
        return self.decode(self.encode(x), x.shape[-1], x.dtype)

    def _code_bytes(self, width: int) -> int:
        return width if self.element is Element.E4M3 else width // 2

    def _scale_values(self, scale_bytes: Tensor) -> Tensor:
        kind = torch.float8_e8m0fnu if self.scale is Scale.POWER_OF_TWO else torch.float8_e4m3fn
        return scale_bytes.view(kind).float()


FP8_BLOCK32 = PackedFormat(Element.E4M3, Scale.POWER_OF_TWO, group=32, amax_min=1e-4)
"""Window rows."""
FP4_BLOCK16 = PackedFormat(Element.E2M1, Scale.E4M3, group=16, amax_min=E2M1_MAX * 2.0**-9)
"""Global KV entries."""
MXFP4_BLOCK32 = PackedFormat(Element.E2M1, Scale.POWER_OF_TWO, group=32, amax_min=E2M1_MAX * 2.0**-126)
"""Index keys and index queries."""


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
