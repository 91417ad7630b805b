"""Ranks in processes of their own that compute on GPUs: rows go from device to device through NCCL, or are written to
the other devices of the machine (`peer_memory.py`), votes go through gloo.

An exchange is queued on the device, and the host goes on; `settle` waits for what is queued. NCCL does not notice that
a rank has died: who leaves says so in the group's store, and who reads that aborts the exchanges that wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline

from .peer_memory import PeerMemory, place_of_process, share_memory
from .process_group import ProcessGroupTransport
from .transport import GroupBrokenError

log = logging.getLogger(__name__)

WATCH_S = 0.05
QUERY_S = 2e-5
GONE = "gone"


class NcclTransport:
    """One rank's side, for the thread on which it joined."""

    def __init__(
        self,
        backend: Any,  # noqa: ANN401
        votes: ProcessGroupTransport,
        store: Store,
        *,
        device: torch.device,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`backend`: NCCL's, for which torch has no type. `store`: of this group alone."""
        self._backend: Any = backend
        self._votes = votes
        self._store: Any = store
        self._device = device
        self._timeout_s = timeout_s
        self._clock = clock
        self._shared: list[PeerMemory] = []
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="nccl-watcher", daemon=True)
        self._watcher.start()
        self.rank = votes.rank
        self.size = votes.size

    @classmethod
    def join(
        cls,
        store: Store,
        name: str,
        *,
        rank: int,
        size: int,
        host: str,
        device: torch.device,
        timeout_s: float,
        form_timeout_s: float | None = None,
    ) -> NcclTransport:
        """As `ProcessGroupTransport.join`. Each rank has a GPU of its own, `device`."""
        votes = ProcessGroupTransport.join(
            store, name, rank=rank, size=size, host=host, timeout_s=timeout_s, form_timeout_s=form_timeout_s
        )
        # The defaults end the process when an exchange takes too long; here the group ends, and the process goes on.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        own = PrefixStore(f"{name}/nccl", store)
        torch.cuda.set_device(device)
        try:
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=timeout_s)
            joined = cls(nccl(own, rank, size, options), votes, own, device=device, timeout_s=timeout_s)
            each = [1] * size  # the communicator comes into being with the first exchange
            joined.exchange(torch.zeros(size, dtype=torch.uint8, device=device), each, each)
            joined.settle()
        except RuntimeError as error:
            raise GroupBrokenError(f"group {name} did not form: {error}") from None
        return joined

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        """Queued on the current stream."""
        received = torch.empty(sum(received_bytes), dtype=torch.uint8, device=self._device)
        options: Any = dist.AllToAllOptions()
        options.asyncOp = False
        backend = self._backend
        if self._closed.is_set():
            raise GroupBrokenError("the group was closed")
        try:
            work = backend.alltoall_base(received, sent, list(received_bytes), list(sent_bytes), options)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"the group broke: {error}") from None
        return received

    def gather(self, values: Tensor) -> Tensor:
        return self._votes.gather(values)

    def share_memory(self, bytes_each: int) -> PeerMemory | None:
        """None: not all ranks are processes of one machine whose GPUs reach each other's memory. Raises
        GroupBrokenError."""
        name = f"memory{len(self._shared)}"
        try:
            self._store.set(f"{name}/{self.rank}", place_of_process().encode())
            places = {bytes(self._store.get(f"{name}/{rank}")) for rank in range(self.size)}
        except RuntimeError as error:
            raise GroupBrokenError(f"the group broke: {error}") from None
        memory = self._try_to_share(name, bytes_each) if len(places) == 1 and self.size > 1 else None
        if int(self.gather(torch.tensor([int(memory is not None)])).min()) == 0 or memory is None:
            return None
        with self._closing:
            self._shared.append(memory)
            if self._closed.is_set():
                memory.end()
        return memory

    def _try_to_share(self, name: str, bytes_each: int) -> PeerMemory | None:
        store = PrefixStore(f"{name}/handles", self._store)
        try:
            return share_memory(store, rank=self.rank, size=self.size, bytes_each=bytes_each, device=self._device)
        except RuntimeError as error:
            log.warning("experts exchange rows through NCCL alone: %s", error)
            return None

    def settle(self) -> None:
        event = torch.cuda.Event()
        event.record()
        patience = Deadline.after(self._timeout_s, self._clock)
        while not event.query():
            if self._closed.is_set():
                break
            if patience.expired:
                self.close()
            self._closed.wait(QUERY_S)
        if self._closed.is_set():
            raise GroupBrokenError("the group was closed during an exchange")

    def close(self) -> None:
        """As the protocol says. What is queued on the device ends without a result."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
            for memory in self._shared:
                memory.end()
        self._votes.close()
        try:
            self._store.set(GONE, b"1")
        except RuntimeError:
            pass  # the store's host is gone, which says as much
        self._backend.abort()

    def _watch(self) -> None:
        """Until this rank or another one leaves."""
        while not self._closed.wait(WATCH_S):
            try:
                gone = self._store.check([GONE])
            except RuntimeError:
                gone = True
            if gone:
                self.close()
