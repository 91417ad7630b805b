"""What it takes to bring state to the host and back at the released model's size: blocks and hand-off snapshots.

    python benchmarks/state_copies.py

Needs a GPU. Peer: the same records one index operation after the other, through pageable memory. Prints a table, and
last one JSON object. "host": the thread that runs the engine is held up so long; "whole": until the bytes are there.
"beside a step": likewise, while the GPU computes for another 20 ms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whalepod.engine.host_copies import Copied
from whalepod.engine.interface import SnapshotKind
from whalepod.engine.state_image import StateImage
from whalepod.kernels.record_runs import RecordRun, reference, runs_bytes
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RELEASE_FORMATS

RELEASED = Path(__file__).parents[1] / "model/released_config.json"
PINNED_BYTES_PER_S = 55e9
"""Of one large copy between pinned memory and an H200."""
REPEATS = 30
BOUNDARY = 1151
STEP_CYCLES = 40_000_000
BLOCKS, SLOTS = 64, 8


def main() -> None:
    config = ModelConfig.from_json(json.loads(RELEASED.read_text(encoding="utf-8")))
    caches = Caches.allocate(config, blocks=BLOCKS, slots=SLOTS, formats=RELEASE_FORMATS, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for pools in (caches.global_kv, caches.index_keys, caches.windows, caches.draft_windows):
        for pool in pools.values():
            pool.random_(0, 256, generator=generator)
    image = StateImage(caches, config)
    blocks = list(range(8))
    entries = image._entries(3, tokens=caches.block_tokens)  # pyright: ignore[reportPrivateUsage]
    parts = image._parts(SnapshotKind.FULL, 2, 4, BOUNDARY)  # pyright: ignore[reportPrivateUsage]
    rows = [run for runs in parts.values() for run in runs]

    def snapshot() -> Copied[Any]:
        return image.export_snapshot(
            SnapshotKind.FULL, slot=2, blocks=blocks, boundary=BOUNDARY, prompt_tokens=BOUNDARY
        )

    value = image.export_snapshot(
        SnapshotKind.FULL, slot=2, blocks=blocks, boundary=BOUNDARY, prompt_tokens=BOUNDARY
    ).wait()
    parsed = image.parse(value)
    assert parsed is not None
    payload = image.export_block(3).wait()
    received = image.copies.new_buffer(len(payload))
    received[:] = payload
    assert np.array_equal(np.frombuffer(payload, np.uint8), reference.gather_runs(entries).cpu().numpy())
    for part, runs in parts.items():
        plain = reference.gather_runs(runs).cpu().numpy()
        assert np.array_equal(np.frombuffer(value.parts[part], np.uint8), plain), part
    figures = {
        "export block": _measured(image, lambda: image.export_block(3), runs_bytes(entries)),
        "export block, plain": _measured(image, lambda: _plain_read(entries), runs_bytes(entries)),
        "import block": _measured(image, lambda: image.import_block(5, payload), runs_bytes(entries)),
        "import block, received pinned": _measured(image, lambda: image.import_block(5, received), runs_bytes(entries)),
        "import block, plain": _measured(image, lambda: _plain_write(entries, payload), runs_bytes(entries)),
        "export snapshot": _measured(image, snapshot, runs_bytes(rows)),
        "export snapshot, plain": _measured(image, lambda: _plain_read(rows), runs_bytes(rows)),
        "import snapshot": _measured(
            image, lambda: image.import_snapshot(parsed, slot=3, blocks=blocks), runs_bytes(rows)
        ),
        "import snapshot, plain": _measured(
            image,
            lambda: _plain_write(rows, memoryview(b"".join(bytes(value.parts[part]) for part in parts))),
            runs_bytes(rows),
        ),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, medians of {REPEATS}")
    print(f"{'':32} {'bytes':>9} {'bound':>6} {'host':>7} {'whole':>7} {'host beside a step':>19}")
    for name, (size, host, whole, beside) in figures.items():
        print(f"{name:32} {size:9} {1e6 * size / PINNED_BYTES_PER_S:6.0f} {host:7.0f} {whole:7.0f} {beside:19.0f}")
    print(
        json.dumps(
            {name: dict(zip(("bytes", "host", "whole", "beside"), line, strict=True)) for name, line in figures.items()}
        )
    )


def _plain_read(runs: list[RecordRun]) -> None:
    reference.gather_runs(runs).cpu()


def _plain_write(runs: list[RecordRun], data: memoryview) -> None:
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
    reference.scatter_runs(runs, there)


def _measured(image: StateImage, call: Callable[[], Copied[Any] | None], size: int) -> tuple[int, float, float, float]:
    alone = [_once(image, call, busy=False) for _ in range(REPEATS)]
    beside = [_once(image, call, busy=True)[0] for _ in range(REPEATS // 3)]
    hosts, wholes = sorted(host for host, _ in alone), sorted(whole for _, whole in alone)
    return size, hosts[REPEATS // 2], wholes[REPEATS // 2], sorted(beside)[len(beside) // 2]


def _once(image: StateImage, call: Callable[[], Copied[Any] | None], *, busy: bool) -> tuple[float, float]:
    torch.cuda.synchronize()
    image.copies.settle(image.copies.mark())
    if busy:
        torch.cuda._sleep(STEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
    started_s = time.perf_counter()
    copied = call()
    host_s = time.perf_counter() - started_s
    if copied is not None:
        copied.wait()
    else:
        torch.cuda.synchronize()
    return 1e6 * host_s, 1e6 * (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
