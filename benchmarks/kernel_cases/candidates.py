"""The best 2,048 blocks of 8 entries, and scores of those 16,384 entries alone; peer: scoring every entry."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from whalepod.kernels.candidates import candidate_blocks, candidate_scores, entry_places, reference
from whalepod.kernels.packed_index_scores import packed_index_scores

from .measuring import FP8_FLOPS, Row, graph_us, relative_error, row
from .packed_index_scores import HEADS, WIDTH, problem

BLOCK, TOP_BLOCKS, CHOSEN = 8, 2048, 512


def rows() -> Iterator[Row]:
    for sequences, entries in ((8, 131_072), (64, 131_072), (8, 1_048_576)):
        yield from _measure(sequences, entries)


def _measure(sequences: int, entries: int) -> Iterator[Row]:
    count, shape = sequences * 6, f"decode {sequences} × 6 × {entries}"
    given = problem(sequences, 6, 6, entries)
    scores = packed_index_scores(**given)
    blocks = candidate_blocks(scores, given["visible"], block=BLOCK, top_blocks=TOP_BLOCKS)
    maxima = reference.block_maxima(scores[:4], given["visible"][:4], block=BLOCK)
    for mine, best in zip(blocks[:4], maxima, strict=True):
        assert float(best[mine.long()].min()) >= float(best.topk(TOP_BLOCKS).values[-1]), "not the best blocks"
    yield row(
        "candidate blocks",
        shape,
        graph_us(lambda: candidate_blocks(scores, given["visible"], block=BLOCK, top_blocks=TOP_BLOCKS)),
        bytes=count * (entries + TOP_BLOCKS) * 4,
    )
    names = ("queries", "weights", "keys", "tables", "segments", "visible")
    arguments = [given[name] for name in names]
    sizes = {"block": BLOCK, "entries_per_block": given["entries_per_block"]}
    ours, seen = candidate_scores(*[*arguments, blocks], **sizes)
    some = [value[:4] if name in ("queries", "weights", "segments", "visible") else value
            for name, value in zip(names, arguments, strict=True)]  # fmt: skip
    wanted = reference.candidate_scores(*[*some, blocks[:4]], **sizes)
    there = torch.arange(ours.shape[1], device="cuda") < seen[:4, None]
    yield row(
        "candidate scores",
        shape,
        graph_us(lambda: candidate_scores(*[*arguments, blocks], **sizes)),
        bytes=count * TOP_BLOCKS * BLOCK * (68 + 4),
        flops=count * TOP_BLOCKS * BLOCK * HEADS * WIDTH * 2,
        flops_per_s=FP8_FLOPS,
        error=relative_error(ours[:4][there], wanted[there]),
        peer="all entries",
        peer_us=graph_us(lambda: packed_index_scores(**given)),
    )
    chosen = torch.arange(CHOSEN, dtype=torch.int32, device="cuda").repeat(count, 1)
    yield row(
        "entry places",
        shape,
        graph_us(lambda: entry_places(chosen, given["tables"], given["segments"], blocks, **sizes)),
        bytes=count * CHOSEN * 4 * 5,
    )
