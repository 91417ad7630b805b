from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from whalepod.model.checkpoint import load_engram_tables, shard_paths
from whalepod.model.config import ModelConfig
from whalepod.model.engram_reads import EngramReads
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.slow
def test_rows_that_are_not_in_memory_are_counted_once(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    tables = load_engram_tables(tmp_path, ModelConfig.from_dir(tmp_path))
    for path in shard_paths(tmp_path):
        with path.open("rb") as file:  # written, and out of the page cache
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    table = tables[min(tables)]
    reads = EngramReads()
    ids = torch.arange(0, len(table.codes), 7)
    with reads.reading(len(ids)):
        table.rows(ids)
    cold = reads.cold_pages
    with reads.reading(len(ids)):
        table.rows(ids)
    assert reads.rows == 2 * len(ids)
    assert 0 < cold == reads.cold_pages
