"""What needs no GPU of memory that ranks write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from whalepod.engine.expert_parallel.peer_memory import PeerMemory, Renumbered, place_of_process


def test_ranks_of_different_age_exchange_handles_under_the_same_keys() -> None:
    """torch counts what a process has exchanged, not what a group has."""
    shared: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  where torch documents it
    young, old = Renumbered(shared), Renumbered(shared)
    for number in range(2):
        old.set(f"CUDASymmetricMemory/{number + 7}/0", b"old %d" % number)
        young.set(f"CUDASymmetricMemory/{number}/1", b"young %d" % number)
        young.wait([f"CUDASymmetricMemory/{number}/0"])
        assert young.get(f"CUDASymmetricMemory/{number}/0") == b"old %d" % number
        assert old.get(f"CUDASymmetricMemory/{number + 7}/1") == b"young %d" % number
    young.set("other", b"1")
    assert old.get("other") == b"1"


def test_a_rank_that_is_told_to_end_does_so_from_any_thread() -> None:
    """Memory is shared in a step, in inference mode; the thread that watches over the group is not."""
    with torch.inference_mode():
        own = torch.zeros(64 + 2 * 16, dtype=torch.uint8)
        memory = PeerMemory(own, [own.data_ptr(), 0], rank=0, bytes_each=64, keep=None)
    memory.end()
    assert memory.own.numel() == 64


def test_processes_of_this_machine_are_in_one_place() -> None:
    assert place_of_process() == place_of_process()
