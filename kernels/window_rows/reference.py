"""Projected rows to window records, in plain torch: norm, rotation and encoding one after the other."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.kernels.rms_norm import rms_norm
from whalepod.kernels.rope import rotary_factors, rotate


def write_window_rows(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, destinations: Tensor, pool: Tensor, *, eps: float
) -> None:
    turned = rotate(rms_norm(rows, weight, eps=eps), *rotary_factors(cos, sin, rows.shape[1]))
    kept = destinations >= 0
    pool[destinations[kept].long()] = FP8_BLOCK32.encode(turned[kept])
