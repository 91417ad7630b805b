"""SIGTERM as a Ray worker gets it: its actor lives on another thread than the one that may set handlers."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import asyncio, os, signal, sys, threading
import ray._private.utils
from whalepod.cluster.worker_signals import calling_on_sigterm, install

async def serve():
    told = asyncio.Event()
    if sys.argv[1] == "early":
        os.kill(os.getpid(), signal.SIGTERM)
    with calling_on_sigterm(told.set):
        os.kill(os.getpid(), signal.SIGUSR1)
        if sys.argv[1] == "serving":
            await asyncio.sleep(0.1)
            assert not told.is_set(), "another signal"
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(told.wait(), 10)
    print("drained")

install()
signal.signal(signal.SIGUSR1, lambda *_: None)
ray._private.utils.set_sigterm_handler(lambda *_: os._exit(1))  # as Ray does before its loop
actor = threading.Thread(target=lambda: asyncio.run(serve()))
actor.start()
actor.join()
"""


@pytest.mark.parametrize("when", ["early", "serving"])
def test_sigterm_reaches_the_loop_of_an_actor_and_ends_nothing_by_itself(when: str) -> None:
    done = subprocess.run([sys.executable, "-c", WORKER, when], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "drained\n"), done.stderr
