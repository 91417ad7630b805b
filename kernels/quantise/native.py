"""The operators of `operators.c`. `records` below are what `PackedFormat` says of itself, as the operators take it."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from whalepod.kernels.native.library import operator

Numbers: TypeAlias = tuple[bool, bool, int]
"""Whether codes have four bits, whether scales are powers of two, channels that share one."""

_encode, _decode, _round_trip = operator("encode"), operator("decode"), operator("round_trip")


def encode(x: Tensor, numbers: Numbers, *, amax_min: float, record_bytes: int) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    records = torch.empty((*x.shape[:-1], record_bytes), dtype=torch.uint8)
    rows = records.numel() // record_bytes
    _encode(x.data_ptr(), records.data_ptr(), rows, width, record_bytes, *numbers, amax_min)
    return records


def decode(records: Tensor, width: int, numbers: Numbers) -> Tensor:
    records = records.contiguous()
    out = torch.empty((*records.shape[:-1], width), dtype=torch.float32)
    record_bytes = records.shape[-1]
    _decode(records.data_ptr(), out.data_ptr(), records.numel() // record_bytes, width, record_bytes, *numbers)
    return out


def round_trip(x: Tensor, numbers: Numbers, *, amax_min: float) -> Tensor:
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    _round_trip(x.data_ptr(), out.data_ptr(), x.numel() // width, width, *numbers, amax_min)
    return out
