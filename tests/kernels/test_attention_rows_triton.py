"""The Triton kernels against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.attention_rows import (
    EntryRows,
    LatentRows,
    WindowRows,
    reference,
    triton_kernel,
    write_attention_rows,
)
from whalepod.kernels.launch_sizes import forced
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32

LATENT, WIDTH, KEY_WIDTH, PAIRS, POOL, RING = 96, 128, 64, 8, 40, 12
EPS = 1e-20


class World:
    """Draws from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def weight(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator).to(self.dtype)

    def places(self, count: int) -> Tensor:
        """All different; one of them is none."""
        places = torch.randperm(POOL, generator=self.generator)[:count].int()
        places[count // 2] = -1
        return places

    def angles(self, count: int) -> tuple[Tensor, Tensor]:
        turned = torch.rand(count, PAIRS, generator=self.generator) * 6
        return turned.cos(), turned.sin()

    def pool(self, record_bytes: int) -> Tensor:
        return torch.randint(0, 100, (POOL, record_bytes), dtype=torch.uint8, generator=self.generator)

    def latent_rows(self, rows: int = 19) -> LatentRows:
        """That lie apart, as those of a joined product do."""
        joined = self.normal(rows, LATENT + WIDTH).to(self.dtype)
        return LatentRows(joined[:, :LATENT], self.weight(LATENT))

    def window_rows(self, rows: int = 19, size: float = 1.0) -> WindowRows:
        given = self.normal(rows, LATENT + WIDTH).to(self.dtype)[:, LATENT:]
        given[2] = 0
        norm, pool = (self.weight(WIDTH).float() * size).to(self.dtype), self.pool(FP8_BLOCK32.record_bytes(WIDTH))
        return WindowRows(given, norm, *self.angles(rows), self.places(rows), pool)

    def entry_rows(self, ratio: int, rows: int = 19) -> EntryRows:
        """The first group's other rows lie in the ring, the last group is not complete. The newest rows are kept, and
        one of them at the place that the first group reads."""
        ring = members = keeps = None
        groups = rows
        if ratio > 1:
            groups = -(-(rows + 1) // ratio)
            tokens = torch.arange(groups)[:, None] * ratio - 1 + torch.arange(ratio)
            own = (tokens >= 0) & (tokens < rows)
            ring = self.normal(RING, 2 * WIDTH)
            members = torch.where(tokens < 0, -1 - tokens % RING, torch.where(own, tokens, 0)).int()
            latest = (rows - 1 - tokens) // RING * RING + tokens
            elsewhere = (tokens - tokens[0, 0]) % RING == 0
            keeps = torch.where(own & (tokens >= rows - RING) & ~elsewhere, tokens % RING, -1)
            keeps = torch.where(tokens < 0, latest, keeps).int()
        destinations = self.places(groups)
        if ratio > 1:
            destinations[-1] = -1
        return EntryRows(
            self.normal(rows, WIDTH if ratio == 1 else 2 * WIDTH),
            ring,
            members,
            keeps,
            self.weight(WIDTH),
            (self.normal(KEY_WIDTH, WIDTH) / WIDTH**0.5).to(self.dtype),
            self.weight(KEY_WIDTH),
            *self.angles(groups),
            destinations,
            self.pool(FP4_BLOCK16.record_bytes(WIDTH)),
            self.pool(MXFP4_BLOCK32.record_bytes(KEY_WIDTH)),
        )


def assert_records(
    ours: Tensor, wanted: Tensor, before: Tensor, destinations: Tensor, decode: Callable[[Tensor], Tensor]
) -> None:
    written = destinations[destinations >= 0].long()
    others = torch.ones(POOL, dtype=torch.bool).index_fill(0, written, False)
    assert torch.equal(ours[others], before[others])
    a, b = decode(ours[written]), decode(wanted[written])
    # Sums have another order: a value may cross the middle between two codes, and a group that between two scales.
    assert (a != b).float().mean() < 0.02
    assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-6, 300.0])
def test_window_records_match_and_others_stay(dtype: torch.dtype, size: float) -> None:
    ours, theirs = (World(1, dtype).window_rows(size=size) for _ in range(2))
    before = ours.pool.clone()
    triton_kernel.write_attention_rows(None, ours, None, eps=EPS)
    reference.write_window_rows(theirs, eps=EPS)
    decode = lambda records: FP8_BLOCK32.decode(records, WIDTH, torch.float32)  # noqa: E731
    assert_records(ours.pool, theirs.pool, before, ours.destinations, decode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_entries_keys_and_ring_match_and_others_stay(ratio: int, dtype: torch.dtype) -> None:
    ours, theirs = (World(ratio, dtype).entry_rows(ratio) for _ in range(2))
    entries, keys = ours.entries.clone(), ours.keys.clone()
    triton_kernel.write_attention_rows(None, None, ours, eps=EPS)
    reference.write_entries(theirs, eps=EPS)
    for mine, wanted, before, kind, width in (
        (ours.entries, theirs.entries, entries, FP4_BLOCK16, WIDTH),
        (ours.keys, theirs.keys, keys, MXFP4_BLOCK32, KEY_WIDTH),
    ):
        assert_records(
            mine, wanted, before, ours.destinations, lambda r, k=kind, w=width: k.decode(r, w, torch.float32)
        )
    if ours.ring is not None and theirs.ring is not None:
        assert torch.equal(ours.ring, theirs.ring)


def test_a_row_takes_the_place_of_one_that_its_group_is_read_from_once_that_is_read() -> None:
    given = World(2).entry_rows(2)
    assert given.ring is not None and given.members is not None and given.keeps is not None
    assert given.members[0, 0] < 0 <= given.keeps[0, 0], "the first group reads a place, and a row is to come there"
    place, row = -1 - int(given.members[0, 0]), int(given.keeps[0, 0])
    without = replace(
        given, ring=given.ring.clone(), keeps=torch.full_like(given.keeps, -1), entries=given.entries.clone()
    )
    triton_kernel.write_attention_rows(None, None, given, eps=EPS)
    triton_kernel.write_attention_rows(None, None, without, eps=EPS)
    assert torch.equal(given.ring[place], given.raw[row])
    assert torch.equal(given.entries, without.entries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounded", [False, True])
def test_latents_are_normalised_and_rounded(dtype: torch.dtype, rounded: bool) -> None:
    given = replace(World(3, dtype).latent_rows(), rounding=FP8_BLOCK32 if rounded else None)
    ours = triton_kernel.write_attention_rows(given, None, None, eps=EPS)
    wanted = reference.query_latents(given, eps=EPS)
    assert ours is not None and ours.dtype == dtype and ours.is_contiguous()
    # Half a unit of the dtype, or of E4M3, may fall either way.
    torch.testing.assert_close(ours, wanted, rtol=0.07 if rounded else 0.01, atol=1e-6)
    assert ((ours - wanted).abs() > 1e-6 * wanted.abs()).float().mean() < 0.01


@pytest.mark.parametrize("warps", [1, 8])
@pytest.mark.parametrize("ratio", [1, 2])
def test_one_launch_gives_what_each_part_alone_gives(ratio: int, warps: int) -> None:
    def drawn() -> tuple[LatentRows, WindowRows, EntryRows]:
        world = World(4)
        return world.latent_rows(rows=7), world.window_rows(rows=21), world.entry_rows(ratio)

    with forced("attention_rows", num_warps=warps):
        latents, window, entries = drawn()
        together = triton_kernel.write_attention_rows(latents, window, entries, eps=EPS)
        latents, alone, others = drawn()
        apart = triton_kernel.write_attention_rows(latents, None, None, eps=EPS)
        triton_kernel.write_attention_rows(None, alone, None, eps=EPS)
        triton_kernel.write_attention_rows(None, None, others, eps=EPS)
    assert together is not None and apart is not None and torch.equal(together, apart)
    assert torch.equal(window.pool, alone.pool)
    assert torch.equal(entries.entries, others.entries) and torch.equal(entries.keys, others.keys)


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("step", [64, 512])
def test_keys_are_those_of_any_slices_and_steps(columns: int, step: int) -> None:
    ours, theirs = World(1, torch.float32).entry_rows(1), World(1, torch.float32).entry_rows(1)
    with forced("index_keys", ROWS=16, COLUMNS=columns, STEP=step, num_warps=4, num_stages=2):
        triton_kernel.write_attention_rows(None, None, ours, eps=EPS)
    reference.write_entries(theirs, eps=EPS)
    assert (ours.keys != theirs.keys).float().mean() < 0.02


def test_the_entry_point_takes_the_reference_for_cpu_tensors() -> None:
    ours, theirs = World(2).entry_rows(2), World(2).entry_rows(2)
    latents, window = World(3).latent_rows(), World(4).window_rows()
    other_window = World(4).window_rows()
    got = write_attention_rows(latents=latents, window=window, entries=ours, eps=EPS)
    reference.write_entries(theirs, eps=EPS)
    reference.write_window_rows(other_window, eps=EPS)
    assert got is not None and torch.equal(got, reference.query_latents(latents, eps=EPS))
    assert torch.equal(window.pool, other_window.pool)
    assert torch.equal(ours.entries, theirs.entries) and torch.equal(ours.keys, theirs.keys)
    assert write_attention_rows(window=window, eps=EPS) is None
    assert write_attention_rows(eps=EPS) is None


def test_no_rows_are_no_launch() -> None:
    world = World(5)
    given = replace(world.latent_rows(), rows=torch.empty(0, LATENT))
    got = triton_kernel.write_attention_rows(given, None, None, eps=EPS)
    assert got is not None and got.shape == (0, LATENT)
