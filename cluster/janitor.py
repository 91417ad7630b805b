"""Ends what a process has started, once that process is gone, however it went.

    serve ── pipe ──▶ janitor: looks at serve's descendants again and again, remembers them
      └─ ends, is killed ─▶ pipe closes ─▶ janitor stops those that are left, removes the run directory, ends

Descendants are remembered because an orphan no longer tells whose child it was. Nothing else is ever touched: a
process counts as the remembered one only if both its number and its start time agree.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.5
GRACE_S = 3.0
"""Between asking what is left to end and killing it."""


class Janitor:
    """The handle that the watched process holds. Keep it until everything has been stopped in good order."""

    def __init__(self, *directories: Path) -> None:
        """Start watching this process. The directories are removed at the end."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "whalepod.cluster.janitor", str(os.getpid()), *map(str, directories)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal is not for the janitor
        )

    def finish(self, *, timeout_s: float = 15.0) -> None:
        """Let it clean up what is left, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)


def watch(pid: int, *directories: Path) -> None:
    """Remember descendants of `pid` until standard input closes, then end them."""
    me = psutil.Process()
    known: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
        known |= _descendants([pid])
        known = {process for process in known if process.is_running()}
    left = known | _descendants([pid, *(process.pid for process in known)])
    end_processes(left - {me})
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def end_processes(processes: Iterable[psutil.Process], *, grace_s: float = GRACE_S) -> None:
    """Ask, wait, kill. A number that has passed to another process is left alone."""
    alive = [process for process in processes if process.is_running()]
    for process in alive:
        _signal(process, kill=False)
    _, stubborn = psutil.wait_procs(alive, timeout=grace_s)
    for process in stubborn:
        _signal(process, kill=True)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if kill:
            process.kill()
        else:
            process.terminate()
    except psutil.Error:
        pass  # it ended by itself in between


def _descendants(pids: Iterable[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in pids:
        try:
            found |= set(psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            continue  # gone, and its children are orphans that we remember
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int)
    parser.add_argument("directories", type=Path, nargs="+")
    arguments = parser.parse_args()
    watch(arguments.pid, *arguments.directories)


if __name__ == "__main__":
    main()
