"""Copies beside the steps of a GPU: the right bytes, in the right order, and nobody waits. Skipped without one; run in
a process of its own, because other tests switch Triton's interpreter on."""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine.engine_world import tiny_model
from whalepod.engine.host_copies import HostCopies
from whalepod.engine.interface import SnapshotKind
from whalepod.engine.state_image import StateImage
from whalepod.kernels.record_runs import RecordPool, RecordRun
from whalepod.model.caches import Caches
from whalepod.model.record_formats import RELEASE_FORMATS, CacheFormats, plain_formats

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)

BLOCKS = [5, 2, 7, 0, 3, 6]
STEP_CYCLES = 400_000_000
"""0.2 s and more."""


def _caches(formats: CacheFormats, *, seed: int, device: str) -> Caches:
    caches = Caches.allocate(tiny_model().config, blocks=8, slots=3, formats=formats, device=device)
    generator = torch.Generator().manual_seed(seed)
    for pools in (caches.global_kv, caches.index_keys, caches.windows, caches.draft_windows):
        for pool in pools.values():
            pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, generator=generator))
    for ring in caches.groups.values():
        ring.copy_(torch.randn(ring.shape, generator=generator))
    return caches


@pytest.mark.parametrize("formats", [RELEASE_FORMATS, plain_formats(torch.float32)], ids=lambda formats: formats.name)
def test_blocks_and_snapshots_are_the_bytes_that_a_cpu_makes_of_the_same_caches(formats: CacheFormats) -> None:
    here, there = (
        StateImage(_caches(formats, seed=1, device=device), tiny_model().config) for device in ("cpu", "cuda")
    )
    target = _caches(formats, seed=2, device="cuda")
    expected = _caches(formats, seed=2, device="cpu")
    image, plain = StateImage(target, tiny_model().config), StateImage(expected, tiny_model().config)
    payload = there.export_block(5).wait()
    assert bytes(payload) == bytes(here.export_block(5).wait())
    received = image.copies.new_buffer(len(payload))
    received[:] = payload
    for block, data in ((3, bytes(payload)), (4, received)):
        image.import_block(block, data)
        plain.import_block(block, data)
    for boundary in (1, 17, 40, 87):
        for kind in SnapshotKind:
            mine, right = (
                each.export_snapshot(kind, slot=1, blocks=BLOCKS, boundary=boundary, prompt_tokens=90).wait()
                for each in (there, here)
            )
            assert {part: bytes(data) for part, data in mine.parts.items()} == {
                part: bytes(data) for part, data in right.parts.items()
            }
            for target_image in (image, plain):
                snapshot = target_image.parse(mine)
                assert snapshot is not None
                target_image.import_snapshot(snapshot, slot=2, blocks=BLOCKS)
    torch.cuda.synchronize()
    for pools, right_pools in zip(
        (target.global_kv, target.index_keys, target.windows, target.draft_windows, target.groups),
        (expected.global_kv, expected.index_keys, expected.windows, expected.draft_windows, expected.groups),
        strict=True,
    ):
        for layer, pool in pools.items():
            assert torch.equal(pool.cpu(), right_pools[layer])


def _records() -> tuple[HostCopies, torch.Tensor, list[RecordRun]]:
    copies = HostCopies(torch.device("cuda"))
    records = torch.full((1, 64, 528), 7, dtype=torch.uint8, device="cuda")
    runs = [RecordRun(RecordPool(records, 512), 0, 60, 8)]
    copies.read(runs).wait()  # compiles
    copies.settle(copies.mark())
    return copies, records, runs


def test_what_is_settled_is_read_while_the_next_step_is_computed() -> None:
    copies, records, runs = _records()
    torch.cuda._sleep(STEP_CYCLES)
    records.fill_(9)
    step = torch.cuda.Event()
    step.record()
    assert set(bytes(copies.read(runs).wait())) == {7}
    assert not step.query(), "it was waited for"
    step.synchronize()
    copies.settle(copies.mark())
    assert set(bytes(copies.read(runs).wait())) == {9}


def test_a_step_that_is_launched_after_a_copy_comes_after_it() -> None:
    copies, records, runs = _records()
    assert copies._stream is not None
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(STEP_CYCLES)
    copied = copies.read(runs)
    records.fill_(9)
    assert set(bytes(copied.wait())) == {7}
    copies.settle(copies.mark())
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(STEP_CYCLES)
    given = copies.new_buffer(8 * 528)
    given[:] = bytes([5]) * len(given)
    copies.write(runs, [torch.frombuffer(given, dtype=torch.uint8).numpy()])
    assert records.sum().item() == 9 * 56 * 528 + 5 * 8 * 528
