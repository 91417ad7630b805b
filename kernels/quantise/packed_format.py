"""What a packed format is, and the version of encoding and decoding that a machine takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from whalepod.kernels.native import library

from . import native, reference
from .reference import E2M1_MAX


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
        return (width if self.element is Element.E4M3 else width // 2) + width // self.group

    def encode(self, x: Tensor) -> Tensor:
        """x [..., width] float -> records [..., record_bytes] uint8."""
        if library.takes(x) and x.numel():
            record_bytes = self.record_bytes(x.shape[-1])
            return native.encode(x, self.numbers, amax_min=self.amax_min, record_bytes=record_bytes)
        four_bits, power, group = self.numbers
        return reference.encode(x, four_bits=four_bits, power=power, group=group, amax_min=self.amax_min)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """records [..., record_bytes] uint8 -> [..., width] in `dtype`; exact in bfloat16 and wider."""
        if dtype is torch.float32 and records.is_cpu and library.takes() and records.numel():
            return native.decode(records, width, self.numbers)
        four_bits, power, group = self.numbers
        return reference.decode(records, width, dtype, four_bits=four_bits, power=power, group=group)

    def round_trip(self, x: Tensor) -> Tensor:
        """The values that a record of x would hold, in the dtype of x."""
        if library.takes(x) and x.numel() and x.shape[-1] % self.group == 0:
            return native.round_trip(x, self.numbers, amax_min=self.amax_min)
        return self.decode(self.encode(x), x.shape[-1], x.dtype)

    @property
    def numbers(self) -> native.Numbers:
        """Whether codes have four bits, whether scales are powers of two, channels that share one."""
        return self.element is Element.E2M1, self.scale is Scale.POWER_OF_TWO, self.group


FP8_BLOCK32 = PackedFormat(Element.E4M3, Scale.POWER_OF_TWO, group=32, amax_min=1e-4)
"""Window rows."""
FP4_BLOCK16 = PackedFormat(Element.E2M1, Scale.E4M3, group=16, amax_min=E2M1_MAX * 2.0**-9)
"""Global KV entries."""
MXFP4_BLOCK32 = PackedFormat(Element.E2M1, Scale.POWER_OF_TWO, group=32, amax_min=E2M1_MAX * 2.0**-126)
"""Index keys and index queries."""
