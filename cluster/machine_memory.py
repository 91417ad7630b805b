"""How much memory a process may still take here. In a container that is not what the machine has: its cgroup's limit
counts the page cache too, which the kernel gives back under pressure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""What a limit of version 1 says when there is none is near the largest number of bytes."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes."""

    available: int
    """What a process may take: of the machine, or of what is left below the cgroup's limit without page cache."""
    limit: int | None
    """Of the cgroup, if it is below what the machine has."""
    page_cache: int
    """Files' pages that count towards the limit."""


def machine_memory(cgroup: Path = CGROUP) -> MachineMemory:
    machine = psutil.virtual_memory()
    limit, used, cached = _cgroup(cgroup)
    if limit is None or limit >= min(machine.total, UNLIMITED):
        return MachineMemory(machine.available, None, 0)
    return MachineMemory(max(0, min(machine.available, limit - used + cached)), limit, cached)


def _cgroup(directory: Path) -> tuple[int | None, int, int]:
    """Limit, what counts towards it, and how much of that is files' pages."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        stat = (directory / limit).with_name("memory.stat")
        try:
            text = (directory / limit).read_text(encoding="ascii").strip()
            if text == "max":
                return None, 0, 0
            values = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
            cached = sum(int(values.get(name, 0)) for name in ("inactive_file", "active_file"))
            return int(text), int((directory / used).read_text(encoding="ascii")), cached
        except (OSError, ValueError):
            continue
    return None, 0, 0
