"""Query latents, window records, entries and index keys on a GPU at the released model's sizes, against the plain
versions there. Skipped without a GPU; run in a process of its own, as other tests switch Triton's interpreter on."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu_tensors import KEY_WIDTH, WIDTH, angles, assert_close, bf16, draw
from whalepod.kernels.attention_rows import EntryRows, LatentRows, WindowRows, reference, write_attention_rows
from whalepod.kernels.numerics import whole_batches
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat
from whalepod.kernels.rms_norm import reference as norm_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)

Q_RANK, RING = 1280, 14


def window_rows(rows: int) -> WindowRows:
    joined, destinations = bf16(rows, Q_RANK + WIDTH), places(rows)
    destinations[::5] = -1
    pool = torch.zeros(2 * rows, FP8_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device="cuda")
    return WindowRows(joined[:, Q_RANK:], bf16(WIDTH, seed=1), *angles(rows), destinations, pool)


def places(count: int) -> Tensor:
    return torch.randperm(2 * count, device="cuda", generator=torch.Generator("cuda").manual_seed(3))[:count].int()


@pytest.mark.parametrize("rows", [1, 48, 1536, 17_000])
def test_window_rows(rows: int) -> None:
    ours, theirs = window_rows(rows), window_rows(rows)
    write_attention_rows(window=ours, eps=1e-20)
    reference.write_window_rows(theirs, eps=1e-20)
    assert (ours.pool != theirs.pool).float().mean() < 1e-3
    values, wanted = (FP8_BLOCK32.decode(given.pool, WIDTH, torch.float32) for given in (ours, theirs))
    assert_close(values, wanted, 0.01)


@pytest.mark.parametrize("rows", [1, 48, 4200])
def test_query_latents(rows: int) -> None:
    given = LatentRows(bf16(rows, Q_RANK + WIDTH)[:, :Q_RANK], bf16(Q_RANK, seed=1))
    ours = write_attention_rows(latents=given, eps=1e-20)
    assert ours is not None
    assert_close(ours, norm_reference.rms_norm(given.rows.float(), given.norm.float(), eps=1e-20))
    rounded = write_attention_rows(latents=replace(given, rounding=FP8_BLOCK32), eps=1e-20)
    assert rounded is not None and torch.equal(rounded, FP8_BLOCK32.round_trip(ours))


def entry_rows(rows: int, ratio: int) -> EntryRows:
    """Of one sequence whose first group has begun before; the ring keeps the newest rows, one of them at the place that
    this group is read from."""
    members = keeps = ring = None
    groups = rows
    if ratio > 1:
        groups, newest = rows // ratio + 1, max(0, rows - RING)
        tokens = (torch.arange(groups, device="cuda")[:, None] * ratio + torch.arange(ratio, device="cuda")) - 1
        own = (tokens >= 0) & (tokens < rows)
        members = torch.where(tokens < 0, -1 - tokens % RING, torch.where(own, tokens, 0)).int()
        latest = (rows - 1 - tokens) // RING * RING + tokens
        keeps = torch.where(own & (tokens >= newest) & ((tokens + 1) % RING != 0), tokens % RING, -1)
        keeps = torch.where(tokens < 0, torch.where(latest >= 0, latest, -1), keeps).int()
        ring = draw(RING, 2 * WIDTH, seed=1)
    destinations = places(groups)
    destinations[torch.arange(groups, device="cuda") * ratio + ratio - 2 >= rows] = -1
    entries, keys = (
        torch.zeros(2 * groups, kind.record_bytes(width), dtype=torch.uint8, device="cuda")
        for kind, width in ((FP4_BLOCK16, WIDTH), (MXFP4_BLOCK32, KEY_WIDTH))
    )
    weight = (draw(KEY_WIDTH, WIDTH, seed=4) * WIDTH**-0.5).bfloat16()
    norms, raw = (bf16(WIDTH, seed=5), weight, bf16(KEY_WIDTH, seed=6)), draw(rows, WIDTH * min(ratio, 2))
    return EntryRows(raw, ring, members, keeps, *norms, *angles(groups), destinations, entries, keys)


def test_entries_have_the_same_bits_however_many_there_are() -> None:
    given = entry_rows(4200, 1)
    given.destinations.copy_(torch.arange(4200, dtype=torch.int32, device="cuda"))

    def written(taken: slice) -> tuple[Tensor, Tensor]:
        some = replace(
            given,
            raw=given.raw[taken],
            cos=given.cos[taken],
            sin=given.sin[taken],
            destinations=given.destinations[taken],
            entries=torch.zeros_like(given.entries),
            keys=torch.zeros_like(given.keys),
        )
        write_attention_rows(entries=some, eps=1e-20)
        return some.entries[taken], some.keys[taken]

    together = written(slice(0, 4200))
    for taken in (slice(0, 1), slice(5, 22), slice(1000, 1048), slice(4199, 4200)):
        for alone, among in zip(written(taken), together, strict=True):
            assert torch.equal(alone, among[taken])


@pytest.mark.parametrize("sizes", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize(
    ("rows", "ratio"), [(1, 2), (48, 2), (1536, 2), (20_000, 2), (48, 4), (48, 1), (513, 1), (4200, 1), (20_000, 1)]
)
def test_global_entries(rows: int, ratio: int, sizes: bool) -> None:
    ours, theirs = entry_rows(rows, ratio), entry_rows(rows, ratio)
    with whole_batches(sizes):
        write_attention_rows(entries=ours, eps=1e-20)
    reference.write_entries(theirs, eps=1e-20)
    kinds: list[tuple[PackedFormat, int, Tensor, Tensor]] = [
        (FP4_BLOCK16, WIDTH, ours.entries, theirs.entries),
        (MXFP4_BLOCK32, KEY_WIDTH, ours.keys, theirs.keys),
    ]
    for kind, width, mine, wanted in kinds:
        a, b = (kind.decode(pool, width, torch.float32) for pool in (mine, wanted))
        # A bfloat16 rounding that flips may carry a value over the middle between two codes.
        assert (a != b).float().mean() < 0.01
        assert_close(a, b, 0.05)
    assert (ours.ring is None and theirs.ring is None) or torch.equal(ours.ring, theirs.ring)  # pyright: ignore[reportArgumentType]


def test_one_launch_gives_what_each_part_alone_gives() -> None:
    latents = LatentRows(bf16(700, Q_RANK + WIDTH)[:, :Q_RANK], bf16(Q_RANK, seed=1))
    window, alone, entries, others = window_rows(1536), window_rows(1536), entry_rows(1536, 2), entry_rows(1536, 2)
    together = write_attention_rows(latents=latents, window=window, entries=entries, eps=1e-20)
    apart = write_attention_rows(latents=latents, eps=1e-20)
    write_attention_rows(window=alone, eps=1e-20)
    write_attention_rows(entries=others, eps=1e-20)
    assert together is not None and apart is not None and torch.equal(together, apart)
    assert torch.equal(window.pool, alone.pool)
    assert torch.equal(entries.entries, others.entries) and torch.equal(entries.keys, others.keys)
