"""32 index heads of 128 channels over MXFP4 keys (68 B) that 6 rows of a sequence share; peer: DeepGEMM on FP8 keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from whalepod.kernels.packed_index_scores import packed_index_scores, reference
from whalepod.kernels.quantise import MXFP4_BLOCK32

from .measuring import FP8_FLOPS, Row, graph_us, relative_error, row

HEADS, WIDTH, BLOCK = 32, 128, 256
CHECKED_GROUPS = 3


def rows() -> Iterator[Row]:
    for sequences, entries in ((8, 65_536), (8, 131_072), (64, 65_536), (64, 131_072)):
        yield _measure(f"decode {sequences} × 6 × {entries}", sequences, 6, 6, entries)
    yield _measure("prefill 2048 × 32768", 1, 2048, 8, 32_768)


def problem(sequences: int, rows_each: int, group_rows: int, entries: int) -> dict[str, Any]:
    """Arguments of `packed_index_scores`: a sequence's last row sees all entries, the one before it one less, …"""
    generator = torch.Generator("cuda").manual_seed(1)
    rows, blocks = sequences * rows_each, entries // BLOCK
    normal = torch.randn(rows, HEADS, WIDTH, device="cuda", generator=generator).bfloat16()
    pool = torch.empty(sequences * entries, MXFP4_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    for some in pool.split(1 << 20):
        some.copy_(MXFP4_BLOCK32.encode(torch.randn(some.shape[0], WIDTH, device="cuda", generator=generator)))
    starts = torch.arange(0, rows_each, group_rows, device="cuda")
    each = torch.arange(sequences, device="cuda")
    first = (each[:, None] * rows_each + starts).flatten()
    count = (rows_each - starts).clamp(max=group_rows).repeat(sequences)
    return {
        "queries": MXFP4_BLOCK32.round_trip(normal),
        "weights": torch.randn(rows, HEADS, device="cuda", generator=generator) * (WIDTH * HEADS) ** -0.5,
        "keys": pool,
        "tables": torch.randperm(sequences * blocks, device="cuda", generator=generator).int().view(sequences, blocks),
        "segments": each.repeat_interleave(rows_each).int(),
        "visible": (entries + 1 - rows_each + torch.arange(rows_each, device="cuda")).repeat(sequences).int(),
        "groups": torch.stack((first, count, each.repeat_interleave(len(starts)))).int().contiguous(),
        "entries_per_block": BLOCK,
        "group_rows": group_rows,
        "entries_max": entries,
    }


def _measure(shape: str, sequences: int, rows_each: int, group_rows: int, entries: int) -> Row:
    given = problem(sequences, rows_each, group_rows, entries)
    scores = packed_index_scores(**given)
    error = 0.0
    for group in torch.linspace(0, given["groups"].shape[1] - 1, CHECKED_GROUPS).long().tolist():
        picked = {name: value for name, value in given.items() if name not in ("group_rows", "segments")}
        picked["groups"] = given["groups"][:, group : group + 1]
        start, count, _ = picked["groups"][:, 0].tolist()
        expected = reference.packed_index_scores(**picked)[start : start + count]
        seen = torch.arange(entries, device="cuda") < given["visible"][start : start + count, None]
        error = max(error, relative_error(scores[start : start + count][seen], expected[seen]))
        del expected
    del scores
    us = graph_us(lambda: packed_index_scores(**given))
    rows = sequences * rows_each
    moved = sequences * entries * given["keys"].shape[1] + rows * entries * 4 + rows * HEADS * WIDTH * 2
    flops = rows * entries * HEADS * WIDTH * 2
    peer, peer_us = ("DeepGEMM fp8", _deep_gemm_us(sequences, rows_each, entries)) if rows_each == 6 else (None, None)
    return row(
        "packed_index_scores",
        shape,
        us,
        bytes=moved,
        flops=flops,
        flops_per_s=FP8_FLOPS,
        error=error,
        peer=peer,
        peer_us=peer_us,
    )


def _deep_gemm_us(sequences: int, rows_each: int, entries: int) -> float | None:
    """`fp8_paged_mqa_logits` with two rows a call's sequence, the most that fits its shared memory."""
    try:
        import deep_gemm  # pyright: ignore[reportMissingImports]

        batch, blocks = sequences * rows_each // 2, entries // 64
        generator = torch.Generator("cuda").manual_seed(6)
        queries = torch.randn(batch, 2, HEADS, WIDTH, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        pool = torch.randint(
            0, 100, (sequences * blocks, 64, 1, 132), device="cuda", generator=generator, dtype=torch.uint8
        )
        weights = torch.randn(batch * 2, HEADS, device="cuda", generator=generator)
        lengths = torch.full((batch, 2), entries, device="cuda", dtype=torch.int32)
        table = torch.arange(sequences * blocks, device="cuda", dtype=torch.int32).view(sequences, blocks)
        table = table.repeat_interleave(rows_each // 2, dim=0).contiguous()
        meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
        return graph_us(
            lambda: deep_gemm.fp8_paged_mqa_logits(queries, pool, weights, lengths, table, meta, entries, False)
        )
    except (ImportError, RuntimeError, AssertionError, TypeError, AttributeError) as problem:
        print(f"DeepGEMM: {type(problem).__name__} {str(problem)[:300]}")
        return None
