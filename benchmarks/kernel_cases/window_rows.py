"""Norm, rotation, FP8 packing and the write of window rows of 512 channels, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.kernels.window_rows import reference, write_window_rows

from .measuring import Row, graph_us, in_graph, relative_error, row

WIDTH, PAIRS = 512, 32


def rows() -> Iterator[Row]:
    for count in (48, 1536, 4096, 8192, 16384):
        yield _measure(count, in_order=False)
    for count in (1536, 8192, 16384):
        yield _measure(count, in_order=True)


def _given(count: int, seed: int, in_order: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, cos, sin, destinations, and the pool of twice as many records. Rows of many sequences go anywhere;
    those of a chunk go `in_order`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    given = torch.randn(count, WIDTH, device="cuda", generator=generator).bfloat16()
    weight = torch.rand(WIDTH, device="cuda", generator=generator).bfloat16()
    angles = torch.rand(count, PAIRS, device="cuda", generator=generator) * 6
    anywhere = torch.randperm(2 * count, device="cuda", generator=generator)[:count].int()
    destinations = torch.arange(count, dtype=torch.int32, device="cuda") if in_order else anywhere
    pool = torch.zeros(2 * count, FP8_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    return given, weight, angles.cos(), angles.sin(), destinations, pool


def _measure(count: int, in_order: bool) -> Row:
    given, theirs = _given(count, 4, in_order), _given(count, 4, in_order)
    write_window_rows(*given, eps=1e-20)
    reference.write_window_rows(*theirs, eps=1e-20)
    values, wanted = (FP8_BLOCK32.decode(each[-1], WIDTH, torch.float32) for each in (given, theirs))
    moved = count * (2 * WIDTH + FP8_BLOCK32.record_bytes(WIDTH) + 8 * PAIRS)

    def make(seed: int) -> Callable[[], object]:
        own = _given(count, seed, in_order)
        return lambda: write_window_rows(*own, eps=1e-20)

    return row(
        "window rows",
        f"{count}, in order" if in_order else f"{count}",
        graph_us(lambda: write_window_rows(*given, eps=1e-20)),
        bytes=moved,
        error=relative_error(values, wanted),
        in_graph=in_graph(make, bytes=moved),
    )
