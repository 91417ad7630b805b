"""64 heads of 512 channels over 128 window rows (528 B) and 512 chosen entries (288 B); peers: FlashMLA, torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32
from whalepod.kernels.sparse_attention import reference, sparse_attention

from .measuring import Row, graph_us, relative_error, row

HEADS, WIDTH, WINDOW, CHOSEN, PAIRS, RING = 64, 512, 128, 512, 32, 140
SCALE = WIDTH**-0.5
CHECKED_ROWS = 24


def rows() -> Iterator[Row]:
    for sequences in (8, 64, 256):
        yield _measure(f"decode {sequences} × 6", sequences, 6)
    yield _measure("prefill 4096", 1, 4096)


def problem(sequences: int, rows_each: int, *, seed: int = 0) -> dict[str, Any]:
    """Arguments of `sparse_attention` on the GPU: the last `rows_each` rows of each sequence.

    Decode rows read rings, rows of a prompt a pool in order of position.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = sequences * rows_each
    normal = partial(torch.randn, device="cuda", generator=generator)
    start = 70_000
    ring = RING if rows_each < WINDOW else 1 << 30
    pool = RING if rows_each < WINDOW else rows_each + WINDOW - 1
    offset = torch.arange(sequences, device="cuda") * pool - (0 if ring == RING else start - WINDOW + 1)
    entries = 65_536 if rows_each < WINDOW else 32_768
    share = torch.arange(sequences, device="cuda").repeat_interleave(rows_each)
    # A row's entries are spread over all of its sequence's; 8 sequences share a pool of entries to bound memory.
    chosen = torch.rand(rows, CHOSEN, device="cuda", generator=generator).mul_(entries).int()
    chosen += (share % 8 * entries).int()[:, None]
    positions = (start + torch.arange(rows_each, device="cuda")).repeat(sequences)
    angles = torch.rand(rows, PAIRS, device="cuda", generator=generator) * 6.28
    return {
        "queries": normal(rows, HEADS, WIDTH).bfloat16(),
        "window": FP8_BLOCK32.encode(normal(sequences * pool, WIDTH)),
        "bases": offset.int().repeat_interleave(rows_each),
        "positions": positions.int(),
        "lowest": torch.zeros(rows, dtype=torch.int32, device="cuda"),
        "sink": normal(HEADS),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "ring": ring,
        "window_rows": WINDOW,
        "scale": SCALE,
        "entries": FP4_BLOCK16.encode(normal(min(sequences, 8) * entries, WIDTH)),
        "chosen": chosen.sort(dim=1).values,
    }


def error_of(out: Tensor, given: dict[str, Any]) -> float:
    """Against the reference in float32, on some rows spread over all."""
    some = torch.linspace(0, out.shape[0] - 1, CHECKED_ROWS, device="cuda").long()
    per_row = ("queries", "bases", "positions", "lowest", "cos", "sin", "chosen")
    picked = given | {name: given[name][some] for name in per_row}
    picked["queries"] = picked["queries"].float()
    return relative_error(out[some], reference.sparse_attention(**picked))


def _measure(shape: str, sequences: int, rows_each: int) -> Row:
    given = problem(sequences, rows_each)
    error = error_of(sparse_attention(**given), given)
    us = graph_us(lambda: sparse_attention(**given))
    moved, flops = moved_and_flops(sequences, rows_each)
    peer, peer_us = _peer(sequences, rows_each)
    return row("sparse_attention", shape, us, bytes=moved, flops=flops, error=error, peer=peer, peer_us=peer_us)


def moved_and_flops(sequences: int, rows_each: int) -> tuple[int, int]:
    rows = sequences * rows_each
    window_bytes = sequences * (WINDOW + rows_each - 1) * FP8_BLOCK32.record_bytes(WIDTH)
    moved = window_bytes + rows * (CHOSEN * FP4_BLOCK16.record_bytes(WIDTH) + 2 * HEADS * WIDTH * 2)
    return moved, rows * 4 * HEADS * WIDTH * (WINDOW + CHOSEN)


def _peer(sequences: int, rows_each: int) -> tuple[str | None, float | None]:
    try:
        return f"FlashMLA {'584 B' if rows_each < WINDOW else 'bf16 rows'}", _flash_mla_us(sequences, rows_each)
    except (ImportError, RuntimeError, AssertionError, TypeError) as problem:
        return f"FlashMLA: {type(problem).__name__} {str(problem)[:200]}", None


def bf16_rows_us(sequences: int, rows_each: int) -> float:
    """FlashMLA's sparse prefill kernel, on rows that are bfloat16 already."""
    from flash_mla import flash_mla_sparse_fwd  # pyright: ignore[reportMissingImports]

    generator = torch.Generator("cuda").manual_seed(7)
    rows, pool = sequences * rows_each, 65_536
    queries = torch.randn(rows, HEADS, WIDTH, device="cuda", generator=generator, dtype=torch.bfloat16)
    keys = torch.randn(pool, 1, WIDTH, device="cuda", generator=generator, dtype=torch.bfloat16)
    index = torch.randint(pool, (rows, 1, WINDOW + CHOSEN), device="cuda", generator=generator, dtype=torch.int32)
    sink = torch.randn(HEADS, device="cuda", generator=generator)
    return graph_us(lambda: flash_mla_sparse_fwd(queries, keys, index, SCALE, WIDTH, sink, use_legacy=True))


def _flash_mla_us(sequences: int, rows_each: int) -> float:
    if rows_each >= WINDOW:
        return bf16_rows_us(sequences, rows_each)
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # pyright: ignore[reportMissingImports]

    generator = torch.Generator("cuda").manual_seed(8)
    blocks, block = 8192, 64
    records = torch.randint(100, 140, (blocks, block, 1, 584), device="cuda", generator=generator, dtype=torch.uint8)
    queries = torch.randn(sequences, rows_each, HEADS, WIDTH, device="cuda", generator=generator, dtype=torch.bfloat16)
    index = torch.randint(
        blocks * block, (sequences, rows_each, WINDOW + CHOSEN), device="cuda", generator=generator, dtype=torch.int32
    )
    sink = torch.randn(HEADS, device="cuda", generator=generator)
    meta, _ = get_mla_metadata()
    return graph_us(
        lambda: flash_mla_with_kvcache(
            queries, records, None, None, WIDTH, meta, None, SCALE, False, True, index, sink, use_legacy=True
        )
    )
