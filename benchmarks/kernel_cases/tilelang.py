"""The TileLang programs, which are second opinions; peers: the default kernels, in Gluon and Triton."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.experts import triton_kernel
from whalepod.kernels.sparse_attention import sparse_attention

from .measuring import Row, graph_us, relative_error, row
from .sparse_attention import error_of, moved_and_flops, problem

EXPERTS, CHOICES, D, COLUMNS, LIMIT = 96, 6, 5120, 2304, 10.0


def rows() -> Iterator[Row]:
    try:
        import tilelang  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as problem:
        print(f"TileLang: {problem}")
        return
    for sequences in (8, 64, 256):
        yield _attention(sequences, 6)
    for count in (256, 1536):
        yield _gates_and_values(count)


def _attention(sequences: int, rows_each: int) -> Row:
    from whalepod.kernels.sparse_attention import tilelang_kernel

    given = problem(sequences, rows_each)
    moved, flops = moved_and_flops(sequences, rows_each)
    return row(
        "sparse_attention, TileLang",
        f"decode {sequences} × {rows_each}",
        graph_us(lambda: tilelang_kernel.sparse_attention(**given)),
        bytes=moved,
        flops=flops,
        error=error_of(tilelang_kernel.sparse_attention(**given), given),
        peer="default",
        peer_us=graph_us(lambda: sparse_attention(**given)),
    )


def _gates_and_values(count: int) -> Row:
    from whalepod.kernels.experts import tilelang_kernel

    generator = torch.Generator("cuda").manual_seed(11)
    gate_up = torch.randn(EXPERTS, 2 * COLUMNS, D, device="cuda", generator=generator, dtype=torch.bfloat16) * D**-0.5
    x = torch.randn(count, D, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, device="cuda", generator=generator).argsort(dim=1)[:, :CHOICES]
    each = triton_kernel.tile_rows(ids, EXPERTS)
    theirs = triton_kernel.deal_tiles(ids.flatten(), EXPERTS, each)
    ours = triton_kernel.deal_tiles(ids.flatten(), EXPERTS, tilelang_kernel.ROWS)
    hidden = tilelang_kernel.hidden_values(x, CHOICES, ours, gate_up, limit=LIMIT)
    wanted = triton_kernel.hidden_values(x, CHOICES, ours, tilelang_kernel.ROWS, gate_up, limit=LIMIT, rounds=False)
    return row(
        f"gates and values, {EXPERTS} experts, TileLang",
        f"{count} × {CHOICES}",
        graph_us(lambda: tilelang_kernel.hidden_values(x, CHOICES, ours, gate_up, limit=LIMIT)),
        bytes=2 * (gate_up.numel() + count * D + count * CHOICES * COLUMNS),
        flops=4 * count * CHOICES * D * COLUMNS,
        error=relative_error(hidden, wanted),
        peer="default",
        peer_us=graph_us(
            lambda: triton_kernel.hidden_values(x, CHOICES, theirs, each, gate_up, limit=LIMIT, rounds=False)
        ),
    )
