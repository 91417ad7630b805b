from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from whalepod.cluster.machine_memory import machine_memory

STAT = "anon 100\ninactive_file 3000\nactive_file 500\nslab 7\n"


def cgroup(directory: Path, limit: str, used: int, *, version: int = 2) -> Path:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    place = directory if version == 2 else directory / "memory"
    place.mkdir(exist_ok=True)
    (place / names[0]).write_text(f"{limit}\n", encoding="ascii")
    (place / names[1]).write_text(f"{used}\n", encoding="ascii")
    (place / "memory.stat").write_text(STAT, encoding="ascii")
    return directory


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_counts_towards_a_containers_limit_and_is_given_back(tmp_path: Path, version: int) -> None:
    memory = machine_memory(cgroup(tmp_path, "100000", 60000, version=version))
    assert (memory.limit, memory.page_cache, memory.available) == (100000, 3500, 43500)


def test_a_container_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert machine_memory(cgroup(tmp_path, "100000", 200000)).available == 0


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_no_limit_leaves_what_the_machine_has(tmp_path: Path, limit: str) -> None:
    memory = machine_memory(cgroup(tmp_path, limit, 5))
    assert memory.limit is None
    assert 0 < memory.available <= psutil.virtual_memory().total


def test_a_machine_without_cgroups_has_what_it_has(tmp_path: Path) -> None:
    assert machine_memory(tmp_path).limit is None
