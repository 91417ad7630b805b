"""Ranks in processes of their own, over torch.distributed's gloo, which exchanges memory of the host.

The group is made by hand, not as the process's default group: it is thrown away and made anew, without the rank that
died, while the process lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from .transport import GroupBrokenError


def open_store(host: str, port: int, *, is_host: bool, timeout_s: float) -> Any:  # noqa: ANN401
    """Where the ranks of a group find each other's addresses. The host passes port 0 and reads the store's own."""
    try:
        store_class: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  where torch documents it
        timeout = timedelta(seconds=timeout_s)
        return store_class(host, port, is_master=is_host, wait_for_workers=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise GroupBrokenError(f"the group's meeting point at {host}:{port} cannot be reached: {error}") from None


class ProcessGroupTransport:
    """One rank's side of a process group."""

    def __init__(self, backend: Any, *, rank: int, size: int) -> None:  # noqa: ANN401
        """`backend`: a c10d backend, for which torch has no type."""
        self._backend: Any = backend
        self.rank = rank
        self.size = size

    @classmethod
    def join(
        cls,
        store: Store,
        name: str,
        *,
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
        form_timeout_s: float | None = None,
    ) -> ProcessGroupTransport:
        """Meet the others of group `name` in `store`. `host`: the address that they reach this rank at.

        `timeout_s`: longest wait for the others in an exchange, and here unless `form_timeout_s` says otherwise. Raises
        GroupBrokenError.
        """
        prefixed = PrefixStore(name, store)
        timeout = timedelta(seconds=timeout_s if form_timeout_s is None else form_timeout_s)
        try:
            gloo: Any = dist.ProcessGroupGloo  # torch has no types for its options
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = timeout
            options._threads = 2
            backend = gloo(prefixed, rank, size, options)
            backend._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise GroupBrokenError(f"group {name} did not form: {error}") from None
        return cls(backend, rank=rank, size=size)

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        """What lies on a GPU goes through the host's memory."""
        received, ours = torch.empty(sum(received_bytes), dtype=torch.uint8), sent.cpu()
        self._do(lambda backend: backend.alltoall_base(received, ours, list(received_bytes), list(sent_bytes)))
        return received.to(sent.device)

    def gather(self, values: Tensor) -> Tensor:
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        self._do(lambda backend: backend.allgather([gathered], [values]))
        return torch.stack(gathered)

    def share_memory(self, bytes_each: int) -> None:
        """Exchanges go through the host's memory."""

    def settle(self) -> None:
        """Every exchange has settled when it returns."""

    def close(self) -> None:
        """Hang up: the others' exchanges fail at once. One of this rank that is under way does not end by this: it ends
        when the rank that it waits for goes, or when its time is over."""
        self._backend = None

    def _do(self, start: Callable[[Any], Any]) -> None:
        backend = self._backend
        if backend is None:
            raise GroupBrokenError("the group was closed")
        try:
            start(backend).wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"the group broke: {error}") from None
