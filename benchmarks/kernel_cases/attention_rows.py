"""What follows attention's first products: norm of query latents, window records, entries of global KV and index keys.

As they run in the network: rows of a joined product, six of each sequence, or where there are more than a step has, of
one; groups and their rows in the ring as a forward plans them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.attention_rows import EntryRows, LatentRows, WindowRows, reference, write_attention_rows
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat
from whalepod.model.packed_plan import PackedEntries
from whalepod.model.rows import Rows

from .measuring import Row, graph_us, in_graph, relative_error, row

LATENT, WIDTH, KEY_WIDTH, PAIRS = 1280, 512, 128, 32
ROWS_EACH, STEP_ROWS_MAX = 6, 4096
RING_ROWS, BLOCK_TOKENS = 14, 128
COUNTS = (48, 1536, 4096, 16384)
KINDS = {0: "window only", 2: "source, r = 2", 1: "source, r = 1"}
EPS = 1e-20


@dataclass(frozen=True, slots=True)
class Given:
    latents: LatentRows
    window: WindowRows
    entries: EntryRows | None

    def write(self) -> Tensor | None:
        return write_attention_rows(latents=self.latents, window=self.window, entries=self.entries, eps=EPS)

    @property
    def bytes(self) -> int:
        """Fewest that are moved: rows in and out, angles, raw rows and those of the ring, records, the key's matrix."""
        count = len(self.window.rows)
        moved = count * (4 * LATENT + 2 * WIDTH + FP8_BLOCK32.record_bytes(WIDTH) + 8 * PAIRS)
        entries = self.entries
        if entries is None:
            return moved
        written = int((entries.destinations >= 0).sum())
        records = FP4_BLOCK16.record_bytes(WIDTH) + MXFP4_BLOCK32.record_bytes(KEY_WIDTH)
        moved += entries.raw.numel() * 4 + KEY_WIDTH * WIDTH * 2 + written * records
        if entries.members is not None and entries.keeps is not None:
            crossing = int((entries.members < 0).sum()) + int((entries.keeps >= 0).sum())
            moved += crossing * 8 * WIDTH + written * 8 * PAIRS
        return moved


def rows() -> Iterator[Row]:
    for ratio in KINDS:
        for count in COUNTS:
            yield _measure(count, ratio)


def given(count: int, ratio: int, seed: int) -> Given:
    """Of `count` rows; `ratio` 0: of a layer that is no source."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    joined = draw(count, LATENT + WIDTH).bfloat16()
    latents, window = joined.split([LATENT, WIDTH], dim=1)
    angles = torch.rand(count, PAIRS, device="cuda", generator=generator) * 6
    places = torch.randperm(2 * count, device="cuda", generator=generator)[:count].int()
    pool = torch.zeros(2 * count, FP8_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    return Given(
        LatentRows(latents, draw(LATENT).bfloat16()),
        WindowRows(window, draw(WIDTH).bfloat16(), angles.cos(), angles.sin(), places, pool),
        _entries(count, ratio, draw, angles) if ratio else None,
    )


def _entries(count: int, ratio: int, draw: Callable[..., Tensor], angles: Tensor) -> EntryRows:
    plan, sequences = _plan(count, ratio)
    groups, grouped = len(plan.destinations), plan.members is not None
    if grouped:
        angles = draw(groups, PAIRS)
    destinations = plan.destinations.cuda()
    pools = [
        torch.zeros(2 * count, kind.record_bytes(width), dtype=torch.uint8, device="cuda")
        for kind, width in ((FP4_BLOCK16, WIDTH), (MXFP4_BLOCK32, KEY_WIDTH))
    ]
    return EntryRows(
        raw=draw(count, 2 * WIDTH if grouped else WIDTH),
        ring=draw(sequences * RING_ROWS, 2 * WIDTH) if grouped else None,
        members=None if plan.members is None else plan.members.cuda(),
        keeps=None if plan.keeps is None else plan.keeps.cuda(),
        norm=draw(WIDTH).bfloat16(),
        key_weight=(draw(KEY_WIDTH, WIDTH) * WIDTH**-0.5).bfloat16(),
        key_norm=draw(KEY_WIDTH).bfloat16(),
        cos=angles.cos(),
        sin=angles.sin(),
        destinations=torch.where(destinations >= 0, torch.arange(groups, device="cuda"), -1).int(),
        entries=pools[0],
        keys=pools[1],
    )


@cache
def _plan(count: int, ratio: int) -> tuple[PackedEntries, int]:
    """Every second sequence begins within a group of two."""
    each = ROWS_EACH if count <= STEP_ROWS_MAX else count
    sequences = -(-count // each)
    starts = np.arange(sequences) % 2
    ends = np.minimum(starts + each, starts + count - np.arange(sequences) * each)
    blocks = -(-int(ends.max()) // BLOCK_TOKENS)
    plan = PackedEntries.build(
        Rows.between(starts, ends, padded=count),
        np.arange(sequences * blocks).reshape(sequences, blocks),
        np.zeros(sequences, dtype=np.int64),
        np.arange(sequences),
        ratio=ratio,
        block_tokens=BLOCK_TOKENS,
        ring_rows=RING_ROWS,
        shape=None,
    )
    return plan, sequences


def _measure(count: int, ratio: int) -> Row:
    ours, theirs = given(count, ratio, 4), given(count, ratio, 4)
    latents = ours.write()
    wanted = reference.write_attention_rows(theirs.latents, theirs.window, theirs.entries, eps=EPS)
    assert latents is not None and wanted is not None
    errors = [relative_error(latents, wanted), _pool_error(FP8_BLOCK32, ours.window.pool, theirs.window.pool, WIDTH)]
    if ours.entries is not None and theirs.entries is not None:
        mine, others = ours.entries, theirs.entries
        errors.append(_pool_error(FP4_BLOCK16, mine.entries, others.entries, WIDTH))
        errors.append(_pool_error(MXFP4_BLOCK32, mine.keys, others.keys, KEY_WIDTH))
        assert mine.ring is None or others.ring is None or torch.equal(mine.ring, others.ring)
    return row(
        f"attention rows, {KINDS[ratio]}",
        f"{count}",
        graph_us(ours.write),
        bytes=ours.bytes,
        flops=0 if ours.entries is None else 2 * int((ours.entries.destinations >= 0).sum()) * WIDTH * KEY_WIDTH,
        error=max(errors),
        in_graph=in_graph(lambda seed: given(count, ratio, seed).write, bytes=ours.bytes),
    )


def _pool_error(kind: PackedFormat, ours: Tensor, theirs: Tensor, width: int) -> float:
    values, wanted = (kind.decode(each, width, torch.float32) for each in (ours, theirs))
    return relative_error(values, wanted)
