"""How the ranks of a group exchange bytes: all of them take part in every call, in the same order.

Ranks are threads of one process (here), or processes that meet in the host's memory (`process_group.py`) or between
GPUs (`nccl_group.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .peer_memory import PeerMemory


class GroupBrokenError(Exception):
    """A rank of the group is gone or the group was closed: nothing can be exchanged any more."""


class Transport(Protocol):
    """For one thread. Every method raises GroupBrokenError."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        """All to all: `sent` [Σ sent_bytes] uint8, cut by receiver -> [Σ received_bytes] uint8, by sender, on the same
        device. On a GPU it may only be queued."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """values [n] int64 of this rank, on the host -> [size, n] of all."""
        ...

    def share_memory(self, bytes_each: int) -> PeerMemory | None:
        """So many bytes of every rank that all can write to from their devices; None: they cannot."""
        ...

    def settle(self) -> None:
        """Wait for all exchanges so far. Until then, what they brought may be nothing: a rank may have been lost."""
        ...

    def close(self) -> None:
        """Hang up: the other ranks' calls raise GroupBrokenError, and so does every further one here. Idempotent, from
        any thread."""
        ...


class MemoryHub:
    """Where ranks in one process meet."""

    def __init__(self, size: int, *, timeout_s: float | None = None) -> None:
        """Who waits longer than `timeout_s` for the others breaks the group."""
        self.size = size
        self.boxes: list[Tensor | None] = [None] * size
        self.cuts: list[Sequence[int]] = [()] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)

    def transports(self) -> list[MemoryTransport]:
        return [MemoryTransport(self, rank) for rank in range(self.size)]


class MemoryTransport:
    """One rank's side of a hub."""

    def __init__(self, hub: MemoryHub, rank: int) -> None:
        self._hub = hub
        self.rank = rank

    @property
    def size(self) -> int:
        return self._hub.size

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        hub = self._hub
        assert sent.numel() == sum(sent_bytes), (sent.numel(), sent_bytes)
        hub.boxes[self.rank], hub.cuts[self.rank] = sent, sent_bytes
        self._meet()
        parts: list[Tensor] = []
        for sender in range(self.size):
            box, cuts = hub.boxes[sender], hub.cuts[sender]
            assert box is not None
            assert cuts[self.rank] == received_bytes[sender], "ranks disagree on what they exchange"
            start = sum(cuts[: self.rank])
            parts.append(box[start : start + cuts[self.rank]])
        received = torch.cat(parts)
        self._meet()
        return received

    def gather(self, values: Tensor) -> Tensor:
        hub = self._hub
        hub.boxes[self.rank] = values
        self._meet()
        gathered = torch.stack([box for box in hub.boxes if box is not None])
        self._meet()
        return gathered

    def share_memory(self, bytes_each: int) -> None:
        """There is no device."""

    def settle(self) -> None:
        """Every exchange has settled when it returns."""

    def close(self) -> None:
        self._hub.barrier.abort()

    def _meet(self) -> None:
        try:
            self._hub.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupBrokenError("a rank of this process has left the group") from None
