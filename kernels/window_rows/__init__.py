"""From a projected key-value row to its record in the window ring."""

from __future__ import annotations

from torch import Tensor

from whalepod.kernels.quantise import FP8_BLOCK32

from . import reference

__all__ = ["write_window_rows"]


def write_window_rows(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, destinations: Tensor, pool: Tensor, *, eps: float
) -> None:
    """Normalise rows [count, width], turn their last 2 · pairs channels, and write them as `FP8_BLOCK32` records.

    weight [width]; cos, sin [count, pairs] float32; destinations [count] int32, rows of `pool` [.., record_bytes] uint8
    that are all different, or -1 for a row that is not written.
    """
    count, width = rows.shape
    assert pool.shape[1] == FP8_BLOCK32.record_bytes(width) and destinations.shape == (count,), (pool.shape, rows.shape)
    assert weight.shape == (width,) and cos.shape == sin.shape and cos.shape[0] == count, (weight.shape, cos.shape)
    if not rows.is_cuda:
        reference.write_window_rows(rows, weight, cos, sin, destinations, pool, eps=eps)
        return
    from .triton_kernel import write_window_rows as on_gpu

    on_gpu(rows, weight, cos, sin, destinations, pool, eps=eps)
