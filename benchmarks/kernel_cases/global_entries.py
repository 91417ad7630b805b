"""Pooling, norm, rotation, FP4 packing, index key and its MXFP4 packing, in one pass; peer: the steps in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.global_entries import reference, write_global_entries
from whalepod.kernels.quantise import FP4_BLOCK16, MXFP4_BLOCK32

from .measuring import Row, graph_us, relative_error, row

WIDTH, KEY_WIDTH, PAIRS = 512, 128, 32


def rows() -> Iterator[Row]:
    for ratio in (2, 1):
        for count in (48, 1536, 4096):
            yield _measure(count, ratio)


def _measure(count: int, ratio: int) -> Row:
    generator = torch.Generator("cuda").manual_seed(6)
    columns = WIDTH * (2 if ratio > 1 else 1)
    raw = torch.randn(count, columns, device="cuda", generator=generator)
    number = torch.arange(count, device="cuda", dtype=torch.int32)
    angles = torch.rand(count, PAIRS, device="cuda", generator=generator) * 6
    entries = torch.zeros(count, FP4_BLOCK16.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    keys = torch.zeros(count, MXFP4_BLOCK32.record_bytes(KEY_WIDTH), dtype=torch.uint8, device="cuda")
    given = (
        raw,
        raw if ratio > 1 else None,
        (number[:, None] - 1) if ratio > 1 else None,
        torch.rand(WIDTH, device="cuda", generator=generator).bfloat16(),
        (torch.randn(KEY_WIDTH, WIDTH, device="cuda", generator=generator) * WIDTH**-0.5).bfloat16(),
        torch.rand(KEY_WIDTH, device="cuda", generator=generator).bfloat16(),
        angles.cos(),
        angles.sin(),
        torch.where((number + 1) % ratio == 0, number, -1),
    )
    expected, expected_keys = entries.clone(), keys.clone()
    write_global_entries(*given, entries, keys, eps=1e-20)
    reference.write_global_entries(*given, expected, expected_keys, eps=1e-20)
    values, wanted = (FP4_BLOCK16.decode(records, WIDTH, torch.float32) for records in (entries, expected))
    written = count // ratio * (entries.shape[1] + keys.shape[1])
    return row(
        f"global entries, r = {ratio}",
        f"{count}",
        graph_us(lambda: write_global_entries(*given, entries, keys, eps=1e-20)),
        bytes=raw.numel() * 4 + KEY_WIDTH * WIDTH * 2 + written,
        flops=2 * count // ratio * WIDTH * KEY_WIDTH,
        error=relative_error(values, wanted),
    )
