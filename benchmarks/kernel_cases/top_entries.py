"""The best 512 of a row's scores, and the best 2,048 of its blocks; peer: torch.topk, which breaks ties its own way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.top_entries import reference, top_entries

from .measuring import Row, graph_us, row


def rows() -> Iterator[Row]:
    for rows_, entries, count in (
        (48, 65_536, 512),
        (48, 131_072, 512),
        (384, 65_536, 512),
        (384, 131_072, 512),
        (48, 16_384, 512),
        (48, 524_288, 512),
        (48, 131_072, 2048),
    ):
        yield _measure(rows_, entries, count)


def _measure(rows_: int, entries: int, count: int) -> Row:
    generator = torch.Generator("cuda").manual_seed(2)
    # Sums of few heads' rectified products: half of the scores tie at 0.
    scores = torch.randn(rows_, entries, device="cuda", generator=generator).clamp(min=0)
    visible = torch.randint(entries - 6, entries + 1, (rows_,), device="cuda", generator=generator, dtype=torch.int32)
    for some, name in ((scores, "half ties"), (scores.mul(4).round(), "few values"), (scores.mul(0), "all ties")):
        if not torch.equal(top_entries(some, visible, count=count), reference.top_entries(some, visible, count=count)):
            raise AssertionError(f"top_entries differs: {rows_} × {entries}, {name}")
    us = graph_us(lambda: top_entries(scores, visible, count=count))
    peer_us = graph_us(lambda: torch.topk(scores, count, dim=1, sorted=False))
    moved = rows_ * (entries + count) * 4
    return row("top_entries", f"{rows_} × {entries} → {count}", us, bytes=moved, peer="torch.topk", peer_us=peer_us)
