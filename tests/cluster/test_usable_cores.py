"""How many cores there are to use, and how many router processes they are enough for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whalepod.cluster import config
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.usable_cores import usable_cores
from whalepod.core.errors import ConfigError


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "75000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.75),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_quota_counts_where_there_is_one(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("cores", "processes"), [(0.5, 1), (2, 1), (7.9, 1), (8, 2), (15, 3), (64, 8)])
def test_processes_follow_the_cores_where_operators_can_reach_each(
    monkeypatch: pytest.MonkeyPatch, cores: float, processes: int
) -> None:
    monkeypatch.setattr(config, "usable_cores", lambda: cores)
    asked = ClusterConfig.model_validate({"router": {"admin_port": 9500}})
    assert asked.router.process_count == processes
    assert asked.admin_ports == tuple(range(9500, 9500 + processes))
    assert ClusterConfig().router.process_count == 1
    assert ClusterConfig.model_validate({"router": {"admin_port": 9500, "processes": 5}}).router.process_count == 5


@pytest.mark.parametrize("processes", ["0", "65", "some", "2.5"])
def test_a_number_of_processes_that_is_none_is_refused_by_its_name(processes: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"router\.processes must be a number from 1 to 64, or auto, not '{processes}'"
    ):
        load_config(flags={"--processes": processes})
