"""Norm, rotation, FP8 packing and the write of window rows of 512 channels, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.kernels.window_rows import reference, write_window_rows

from .measuring import Row, graph_us, relative_error, row

WIDTH, PAIRS = 512, 32


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096):
        yield _measure(count)


def _measure(count: int) -> Row:
    generator = torch.Generator("cuda").manual_seed(4)
    given = torch.randn(count, WIDTH, device="cuda", generator=generator).bfloat16()
    weight = torch.rand(WIDTH, device="cuda", generator=generator).bfloat16()
    angles = torch.rand(count, PAIRS, device="cuda", generator=generator) * 6
    destinations = torch.randperm(2 * count, device="cuda", generator=generator)[:count].int()
    pool = torch.zeros(2 * count, FP8_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    arguments = (given, weight, angles.cos(), angles.sin(), destinations)
    expected = pool.clone()
    write_window_rows(*arguments, pool, eps=1e-20)
    reference.write_window_rows(*arguments, expected, eps=1e-20)
    values, wanted = (FP8_BLOCK32.decode(records, WIDTH, torch.float32) for records in (pool, expected))
    return row(
        "window rows",
        f"{count}",
        graph_us(lambda: write_window_rows(*arguments, pool, eps=1e-20)),
        bytes=count * (2 * WIDTH + pool.shape[1] + 8 * PAIRS),
        error=relative_error(values, wanted),
    )
