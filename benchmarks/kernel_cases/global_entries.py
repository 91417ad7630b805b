"""Pooling, norm, rotation, FP4 packing, index key and its MXFP4 packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from whalepod.kernels.global_entries import reference, write_global_entries
from whalepod.kernels.quantise import FP4_BLOCK16, MXFP4_BLOCK32

from .measuring import Row, graph_us, in_graph, relative_error, row

WIDTH, KEY_WIDTH, PAIRS = 512, 128, 32
ENTRIES = -2


def rows() -> Iterator[Row]:
    for ratio in (2, 1):
        for count in (48, 1536, 4096, 8192, 16384):
            yield _measure(count, ratio)


def _given(count: int, ratio: int, seed: int) -> list[Any]:
    """What `write_global_entries` takes: every second row ends a group of two, or every row is one."""
    generator = torch.Generator("cuda").manual_seed(seed)
    raw = torch.randn(count, WIDTH * ratio, device="cuda", generator=generator)
    number = torch.arange(count, device="cuda", dtype=torch.int32)
    angles = torch.rand(count, PAIRS, device="cuda", generator=generator) * 6
    return [
        raw,
        raw if ratio > 1 else None,
        (number[:, None] - 1) if ratio > 1 else None,
        torch.rand(WIDTH, device="cuda", generator=generator).bfloat16(),
        (torch.randn(KEY_WIDTH, WIDTH, device="cuda", generator=generator) * WIDTH**-0.5).bfloat16(),
        torch.rand(KEY_WIDTH, device="cuda", generator=generator).bfloat16(),
        angles.cos(),
        angles.sin(),
        torch.where((number + 1) % ratio == 0, number, -1),
        torch.zeros(count, FP4_BLOCK16.record_bytes(WIDTH), dtype=torch.uint8, device="cuda"),
        torch.zeros(count, MXFP4_BLOCK32.record_bytes(KEY_WIDTH), dtype=torch.uint8, device="cuda"),
    ]


def _measure(count: int, ratio: int) -> Row:
    given, theirs = _given(count, ratio, 6), _given(count, ratio, 6)
    write_global_entries(*given, eps=1e-20)
    reference.write_global_entries(*theirs, eps=1e-20)
    values, wanted = (FP4_BLOCK16.decode(each[ENTRIES], WIDTH, torch.float32) for each in (given, theirs))
    written = count // ratio * (FP4_BLOCK16.record_bytes(WIDTH) + MXFP4_BLOCK32.record_bytes(KEY_WIDTH))
    moved = given[0].numel() * 4 + KEY_WIDTH * WIDTH * 2 + written

    def make(seed: int) -> Callable[[], object]:
        own = _given(count, ratio, seed)
        return lambda: write_global_entries(*own, eps=1e-20)

    return row(
        f"global entries, r = {ratio}",
        f"{count}",
        graph_us(lambda: write_global_entries(*given, eps=1e-20)),
        bytes=moved,
        flops=2 * count // ratio * WIDTH * KEY_WIDTH,
        error=relative_error(values, wanted),
        in_graph=in_graph(make, bytes=moved),
    )
