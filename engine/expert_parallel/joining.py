"""How a rank enters a group that has been agreed: which transports its steps and its moving experts use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from .nccl_group import NcclTransport
from .process_group import ProcessGroupTransport
from .transport import Transport


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one group meet, and how long they wait for each other."""

    store: Store
    name: str
    """Of no other group in this store."""
    rank: int
    size: int
    host: str
    """The address that the others reach this rank at."""
    timeout_s: float
    """In an exchange."""
    form_timeout_s: float


def join_group(meeting: Meeting, device: str) -> tuple[Transport, Transport]:
    """For steps, and for experts that move beside them. Raises GroupBrokenError.

    Experts move through the host's memory everywhere: two NCCL exchanges under way at once could wait for each other.
    """
    place = torch.device(device)
    steps = _join_nccl(meeting, place) if place.type == "cuda" else _join_host(meeting, "steps")
    return steps, _join_host(meeting, "mover")


def _join_host(meeting: Meeting, use: str) -> Transport:
    return ProcessGroupTransport.join(
        meeting.store,
        f"{use}/{meeting.name}",
        rank=meeting.rank,
        size=meeting.size,
        host=meeting.host,
        timeout_s=meeting.timeout_s,
        form_timeout_s=meeting.form_timeout_s,
    )


def _join_nccl(meeting: Meeting, device: torch.device) -> Transport:
    return NcclTransport.join(
        meeting.store,
        f"steps/{meeting.name}",
        rank=meeting.rank,
        size=meeting.size,
        host=meeting.host,
        device=torch.device("cuda", device.index or 0),
        timeout_s=meeting.timeout_s,
        form_timeout_s=meeting.form_timeout_s,
    )
