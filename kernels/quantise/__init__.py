"""Packed number formats of cache records: groups of small floats, each with a scale.

A record is its codes followed by its scales, all bytes. FP4 packs two codes a byte, the even channel in the low
nibble. Rounding is to nearest, ties to even; a value beyond the range saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packed_format import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat

__all__ = ["FP4_BLOCK16", "FP8_BLOCK32", "MXFP4_BLOCK32", "PackedFormat", "round_trip"]


def round_trip(x: Tensor, packed_format: PackedFormat) -> Tensor:
    """`packed_format.round_trip(x)`, where there is one in a single pass over x."""
    if x.is_cuda and x.dtype == torch.bfloat16 and packed_format == FP8_BLOCK32:
        from .triton_kernel import fp8_block32_round_trip

        return fp8_block32_round_trip(x)
    return packed_format.round_trip(x)
