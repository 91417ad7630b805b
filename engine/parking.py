"""State of preempted sequences in host memory: a preempted request resumes where it was, whatever the store holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.kvstore.value_format import SnapshotValue

from .snapshot_format import bytes_of


@dataclass(frozen=True, slots=True)
class Parked:
    """Everything a sequence had below `snapshot.boundary_tokens`."""

    snapshot: SnapshotValue
    payloads: Sequence[memoryview]
    """Its full blocks, by depth."""
    blocks_exact: Sequence[bool]
    """One flag a block."""

    @property
    def bytes(self) -> int:
        return bytes_of(self.snapshot) + sum(payload.nbytes for payload in self.payloads)
