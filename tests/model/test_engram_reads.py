from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch

from whalepod.model.checkpoint import load_engram_tables, shard_paths
from whalepod.model.config import ModelConfig
from whalepod.model.engram_ahead import EngramAhead
from whalepod.model.engram_reads import EngramReads
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.slow
def test_rows_that_are_not_in_memory_are_counted_once(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    tables = load_engram_tables(tmp_path, ModelConfig.from_dir(tmp_path))
    leave_page_cache(tmp_path)
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


def leave_page_cache(directory: Path) -> None:
    for path in shard_paths(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.slow
def test_rows_that_were_expected_are_in_memory_when_they_are_needed(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    tables = load_engram_tables(tmp_path, ModelConfig.from_dir(tmp_path))
    leave_page_cache(tmp_path)
    reads = EngramReads()
    ahead, table = EngramAhead(tables, reads), tables[min(tables)]
    ids = torch.arange(0, len(table.codes), 7)
    looked = Looked(ids, min(tables))
    ahead.expect(looked)
    looked.wait_for(ahead)
    with reads.reading(len(ids)):
        table.rows(ids)
    assert reads.cold_pages == 0 < reads.ahead_pages


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux")
def test_tables_are_mapped_to_be_read_at_random(tmp_path: Path) -> None:
    """Else a row that is missing is read with megabytes around it."""
    write_tiny_checkpoint(tmp_path)
    tables = load_engram_tables(tmp_path, ModelConfig.from_dir(tmp_path))
    for tensor in (tensor for table in tables.values() for tensor in table.stored):
        assert "rr" in flags_of_mapping(tensor.data_ptr() + tensor.numel() // 2)


def flags_of_mapping(address: int) -> list[str]:
    """As the kernel abbreviates them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_readers_rest_while_everything_is_in_memory(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    tables = load_engram_tables(tmp_path, ModelConfig.from_dir(tmp_path))
    for table in tables.values():
        table.rows(torch.arange(len(table.codes)))
    reads = EngramReads()
    ahead, looked = EngramAhead(tables, reads), Looked(torch.arange(20), min(tables))
    ahead.expect(looked)
    looked.wait_for(ahead)
    assert not reads.cold
    again = Looked(torch.arange(20), min(tables))
    ahead.expect(again)
    ahead.bring({min(tables): again.ids})
    assert not again.asked.is_set()
    reads.cold = True  # some page was not there after all
    ahead.expect(again)
    again.wait_for(ahead)


class Looked:
    """Rows that are expected, and whether somebody has asked for them."""

    def __init__(self, ids: torch.Tensor, layer: int) -> None:
        self.ids = ids
        self.asked = threading.Event()
        self._layer = layer

    def __call__(self) -> dict[int, torch.Tensor]:
        self.asked.set()
        return {self._layer: self.ids}

    def wait_for(self, ahead: EngramAhead) -> None:
        """Until they have been looked at."""
        ahead._expecting.submit(int).result(10)  # one after the other
        assert self.asked.is_set()
