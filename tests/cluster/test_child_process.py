"""A child that dies is started again; one that cannot live is given up; stopping is by its own number."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil

from whalepod.cluster.child_process import SupervisedChild

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


async def until_pid_differs(child: SupervisedChild, pid: int | None) -> int:
    async with asyncio.timeout(10):
        while child.pid is None or child.pid == pid:
            await asyncio.sleep(0.01)
    return child.pid


async def test_a_killed_child_is_started_again_and_a_stopped_one_is_not() -> None:
    child = SupervisedChild("sleeper", SLEEPER)
    await child.start()
    first = await until_pid_differs(child, None)
    os.kill(first, signal.SIGKILL)
    second = await until_pid_differs(child, first)
    await child.stop(timeout_s=5)
    assert child.failure is None
    assert not psutil.pid_exists(second)
    await child.stop(timeout_s=5)


async def test_a_child_that_ignores_the_request_to_end_is_killed() -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = SupervisedChild("stubborn", [sys.executable, "-c", stubborn])
    await child.start()
    pid = await until_pid_differs(child, None)
    await child.stop(timeout_s=0.5)
    assert not psutil.pid_exists(pid)


async def test_a_child_that_always_ends_at_once_is_given_up_with_its_code() -> None:
    child = SupervisedChild("broken", [sys.executable, "-c", "raise SystemExit(7)"])
    await child.start()
    async with asyncio.timeout(20):
        while child.failure is None:
            await asyncio.sleep(0.01)
    assert child.failure == "broken ended with code 7, 3 times in a row"
    await child.stop(timeout_s=1)


async def test_the_child_has_a_session_of_its_own() -> None:
    child = SupervisedChild("sleeper", SLEEPER)
    await child.start()
    pid = await until_pid_differs(child, None)
    assert os.getsid(pid) == pid
    await child.stop(timeout_s=5)
