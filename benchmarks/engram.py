"""What n-gram rows cost whose pages are not in memory: gathered as they are needed, or looked at a step before.

    python benchmarks/engram.py [--gib N] [--tokens N] [--steps N] [--compute-ms N] [--directory DIR]

A table of the released row (256 E4M3 codes, 8 scales) in a file, mapped as a checkpoint's is; every step reads the 24
rows of each token, drawn evenly, so that hardly any page is met twice. Before each way the file leaves the page cache.
Steps compute for as long as `--compute-ms` says, which is when the next step's rows can be looked at.

    around   gathered when they are needed, each missing page with what the disk reads around it (`read_ahead_kb`)
    cold     gathered when they are needed, one page after the other
    brought  read side by side when they are needed            ahead    read side by side while the step before computes
    warm     gathered once more: all pages are there

Milliseconds that a step waits for its rows, medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from whalepod.model.checkpoint import EngramTable
from whalepod.model.engram_ahead import EngramAhead
from whalepod.model.engram_reads import EngramReads
from whalepod.model.mapped_memory import expect_random_reads

WIDTH, SCALES, COLUMNS = 256, 8, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the table")
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compute-ms", type=float, default=300.0, help="of a step")
    parser.add_argument("--directory", type=Path, help="where the table is written: a disk, no tmpfs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        bench = Bench(Path(directory) / "table.safetensors", rows=int(asked.gib * 2**30) // (WIDTH + SCALES))
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"{asked.gib:g} GiB, {asked.tokens} tokens a step, {asked.steps} steps of {asked.compute_ms:g} ms")
        figures: dict[str, Any] = {}
        for way in ("around", "cold", "brought", "ahead", "warm"):
            figures[f"{way}_ms"], pages = bench.run(way, asked.tokens, asked.steps, asked.compute_ms / 1e3)
            print(f"{way:8} {figures[f'{way}_ms']:9.1f} ms   {pages} pages of the disk waited for", flush=True)
    figures["ahead_of_cold"] = round(figures["cold_ms"] / figures["ahead_ms"], 1)
    print(json.dumps(figures))


class Bench:
    def __init__(self, path: Path, *, rows: int) -> None:
        self._path = path
        self._rows = rows
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(2**60, (rows * WIDTH // 8,), dtype=torch.int64, generator=generator)
        codes = drawn.view(torch.uint8) & 0x77
        scales = torch.full((rows, SCALES), 127, dtype=torch.uint8)
        save_file({"codes": codes.view(rows, WIDTH).view(torch.float8_e4m3fn), "scales": scales}, path)

    def run(self, way: str, tokens: int, steps: int, compute_s: float) -> tuple[float, int]:
        """Median milliseconds of a step's wait, and pages waited for."""
        table = self._open(cold=way != "warm")
        for tensor in table.stored if way != "around" else ():
            expect_random_reads(tensor)
        reads = EngramReads()
        ahead = EngramAhead({0: table}, reads)
        generator = torch.Generator().manual_seed(1)
        wanted = [torch.randint(self._rows, (tokens, COLUMNS), generator=generator) for _ in range(steps)]
        if way == "warm":
            for rows in wanted:
                table.rows(rows)
        waits: list[float] = []
        for step, rows in enumerate(wanted):
            reads.cold = way in ("brought", "ahead")
            began_s = time.perf_counter()
            if way not in ("around", "cold"):
                ahead.bring({0: rows})
            with reads.reading(rows.numel()):
                table.rows(rows)
            waits.append(1e3 * (time.perf_counter() - began_s))
            reads.cold = way == "ahead"
            following: Tensor | None = wanted[step + 1] if step + 1 < steps else None
            if following is not None:
                ahead.expect(lambda rows=following: {0: rows})
            time.sleep(compute_s)
        return round(statistics.median(waits[1:]), 2), reads.cold_pages

    def _open(self, *, cold: bool) -> EngramTable:
        if cold:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with safe_open(self._path, framework="pt", device="cpu") as file:
            opened: Any = file
            return EngramTable(opened.get_tensor("codes"), opened.get_tensor("scales"), torch.float32)


if __name__ == "__main__":
    main()
