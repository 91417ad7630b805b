"""How many cores a process may use here. In a container that is not what the machine has: its cgroup has a quota."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> float:
    """Those that this process may run on, or what of them the cgroup's quota leaves. A quota may be a part of one."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = _quota(cgroup)
    return cores if quota is None else min(cores, quota)


def _quota(directory: Path) -> float | None:
    """Cores: time of processors in each period, of either version. None: there is no quota."""
    try:
        quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        microseconds = int((directory / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((directory / "cpu/cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return microseconds / period_us if microseconds > 0 else None
