"""Memory that the GPUs of one machine write to each other, beside what NCCL exchanges: a message is there as soon as it
is written, and a barrier says so.

Each rank's part is allocated as symmetric memory of torch, which lives until the last rank that has mapped it lets go:
what a rank writes to one that has died goes nowhere, and harms nobody.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import Store

from whalepod.kernels.expert_messages import meet

SIGNAL_BYTES = 16
"""Room for a signal, of which 4 bytes are used, so that what follows is aligned."""


_numbers = itertools.count()


class PeerMemory:
    """One rank's side. `meet` is for the thread that computes, `end` for any."""

    def __init__(self, own: Tensor, addresses: Sequence[int], *, rank: int, bytes_each: int, keep: object) -> None:
        """`own` [bytes] uint8 of this rank, zeros; `addresses` of every rank's as this device sees it. The first
        `bytes_each` of it are for whoever uses the memory. `keep`: lives as long."""
        size = len(addresses)
        starts = torch.tensor(list(addresses), dtype=torch.int64)
        self.own = own[:bytes_each]
        self.addresses = starts.to(own.device)
        """[ranks] int64"""
        self._rank = rank
        self._keep = keep
        self._signals = (starts + bytes_each).to(own.device)
        self._own_signals = own[bytes_each : bytes_each + 4 * size].view(torch.int32)
        self._round = torch.zeros(1, dtype=torch.int32, device=own.device)
        self._ended = torch.zeros(1, dtype=torch.int32, pin_memory=own.is_cuda)
        self._ended_on_host = self._ended.numpy()  # a thread that is not in inference mode may not write to the tensor

    def meet(self) -> None:
        """Queue that this device waits for all others."""
        meet(self._signals, self._own_signals, self._round, self._ended, rank=self._rank)

    def end(self) -> None:
        """Let go of a device that waits, now and from now on: what it goes on with is nothing."""
        self._ended_on_host[0] = 1


def bytes_in_all(bytes_each: int, size: int) -> int:
    return bytes_each + SIGNAL_BYTES * size


def place_of_process() -> str:
    """Equal for processes that can hand each other memory: of one machine, and one container of it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        machine = boot_id.read().strip()
    return "/".join((machine, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))))


def share_memory(store: Store, *, rank: int, size: int, bytes_each: int, device: torch.device) -> PeerMemory:
    """Every rank of the group takes part. `store`: for this alone. `bytes_each` is a multiple of 16.

    Raises RuntimeError if the devices cannot reach each other's memory.
    """
    # Each rank has the only GPU that it sees, which all call number 0.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    # A program that ends while it uses multicast can put the GPUs of a machine out of service; nothing here uses it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    c10d: Any = _distributed_c10d  # torch.distributed's way to it knows only groups that it has made itself
    bindings = c10d._SymmetricMemory
    store, name = Renumbered(store), f"peer memory {next(_numbers)}"  # a name within this process
    group = c10d.ProcessGroup(store, rank, size)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    bindings.set_group_info(name, rank, size, store)
    total = bytes_in_all(bytes_each, size)
    own: Tensor = bindings.empty_strided_p2p((total,), (1,), torch.uint8, device, name)
    own.zero_()
    torch.cuda.synchronize(device)
    handle: Any = bindings.rendezvous(own, name)  # nobody writes before all have come here
    pointers: Sequence[int] = handle.buffer_ptrs
    offset = own.data_ptr() - pointers[rank]
    addresses = [pointer + offset for pointer in pointers]
    return PeerMemory(own, addresses, rank=rank, bytes_each=bytes_each, keep=(handle, group))


class Renumbered(Store):
    """A store for torch's exchange of handles, whose keys count how often a process has exchanged any: a rank that has
    just begun and one that has seen groups before would wait for each other. Here each store counts from 0."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner: Any = inner
        self._first: int | None = None

    def set(self, key: str, value: bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as it is called
        self._inner.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self._own(key))

    def wait(  # pyright: ignore[reportIncompatibleMethodOverride]  both of its forms
        self,
        keys: list[str],
        *timeout: Any,  # noqa: ANN401
    ) -> None:
        self._inner.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        """Keys are a name, the number, and a rank."""
        if (found := re.fullmatch(r"(.*/)(\d+)(/\d+)", key)) is None:
            return key
        number = int(found[2])
        self._first = number if self._first is None else self._first
        return f"{found[1]}{number - self._first}{found[3]}"
