"""Real processes over gloo: what they exchange, and what they notice when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch

from whalepod.engine.expert_parallel.process_group import ProcessGroupTransport, open_store
from whalepod.engine.expert_parallel.transport import GroupBrokenError

TIMEOUT_S = 20.0
World = list[tuple[SpawnProcess, Connection]]
"""The peers and the pipes to them."""


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    """A peer that exchanges its rank's number with everybody until it is told to stop."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, is_host=False, timeout_s=TIMEOUT_S)
    transport = ProcessGroupTransport.join(store, "test", rank=rank, size=size, host="127.0.0.1", timeout_s=TIMEOUT_S)
    pipe.send("joined")
    try:
        while True:
            sent = torch.full((sum(range(size)),), rank, dtype=torch.uint8)
            received = transport.exchange(sent, list(range(size)), [rank] * size)
            gathered = transport.gather(torch.tensor([rank, received.sum().item()]))
            pipe.send(gathered.tolist())
            pipe.recv()
    except GroupBrokenError as error:
        pipe.send(str(error))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Three peers. Each imports this file by its name, from the path that this process has."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    context = multiprocessing.get_context("spawn")
    store = open_store("127.0.0.1", 0, is_host=True, timeout_s=TIMEOUT_S)
    started: World = []
    for rank in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, 3, store.port, theirs), daemon=True)
        process.start()
        started.append((process, ours))
    for _, pipe in started:
        assert pipe.poll(60)
        assert pipe.recv() == "joined"
    yield started
    for process, _ in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_processes_exchange_what_each_has_for_each_and_notice_a_death(world: World) -> None:
    # Rank r sends r to everybody, i bytes to rank i: rank i receives i bytes from each.
    wanted = [[rank, rank * (0 + 1 + 2)] for rank in range(3)]
    for _, pipe in world:
        assert pipe.poll(TIMEOUT_S)
        assert pipe.recv() == wanted
    victim, _ = world[2]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    for _, pipe in world[:2]:
        pipe.send("again")
        assert pipe.poll(TIMEOUT_S), "a survivor did not notice"
        assert "broke" in pipe.recv()
