"""What needs no GPU of ranks that exchange through NCCL: who leaves ends the exchanges that others wait in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import distributed as dist

from whalepod.engine.expert_parallel.nccl_group import NcclTransport
from whalepod.engine.expert_parallel.transport import GroupBrokenError


class Votes:
    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Backend:
    """Stands in for NCCL's."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def transport(store: Any, rank: int) -> tuple[NcclTransport, Backend, Any]:
    backend, votes = Backend(), Votes(rank)
    made: Any = NcclTransport
    return made(backend, votes, store, device=torch.device("cpu"), timeout_s=5.0), backend, votes


@pytest.mark.parametrize("store_lost", [False, True])
def test_a_rank_that_leaves_ends_the_exchanges_of_the_others(store_lost: bool) -> None:
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  where torch documents it
    leaving, own, _ = transport(store, 0)
    left: Any = LostStore() if store_lost else store
    waiting, backend, votes = transport(left, 1)
    if store_lost:
        left.lost.set()
    else:
        leaving.close()
        assert own.aborted.is_set()
    assert backend.aborted.wait(5), "the other rank still waits"
    assert votes.closed
    with pytest.raises(GroupBrokenError):
        waiting.exchange(torch.zeros(2, dtype=torch.uint8), [1, 1], [1, 1])
    leaving.close()


class LostStore:
    """A store whose host goes."""

    def __init__(self) -> None:
        self.lost = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self._answer()

    def set(self, key: str, value: bytes) -> None:
        self._answer()

    def _answer(self) -> bool:
        if self.lost.is_set():
            raise RuntimeError("connection closed")
        return False
