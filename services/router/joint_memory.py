"""Memory in which the processes of one router (`router.processes`) keep what must be one for all of them.

parent ─▶ create_memory ─▶ a file without a name ─▶ inherited by each process ─▶ JointMemory ─▶ JointParts
          a process has ended ─▶ the parent counts it ─▶ nothing that it has left here is believed any more

Everybody looks and writes for himself, for a few microseconds under a lock that the kernel takes from a process that
dies. A process that owned all this would have to be asked by each request, over a socket and through two event loops,
and would be one more that can hang; Redis is a round trip away, and the router serves while it is not there.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from types import TracebackType
from typing import Final

from whalepod.core.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

PAUSE_S: Final = 50e-6
"""Between two looks at a lock that another holds: about as long as it is held."""
HELD_S_MAX: Final = 0.05
"""A lock is held for microseconds. A holder that has been stopped for so long is not waited for: what is kept here
may then be a little wrong, which costs a computation or admits a request more."""
UNLOCKED_S: Final = 1.0
"""After that, nobody is waited for at that lock for so long."""

FILE_BYTES: Final = 128 << 20
"""More than ROUTER_PROCESSES_MAX processes need. It takes room only as it is written to."""
_RUN: Final = struct.Struct("=I")
_HEAD_BYTES: Final = 4096
"""Before all else: how often each process has ended."""


class JointMemory:
    """One process's view. `process`: which of `processes` it is."""

    def __init__(self, file: int, process: int, *, processes: int, clock: Clock = SYSTEM_CLOCK) -> None:
        """`file`: what `create_memory` returned, in this process. It stays open for as long as this is used."""
        self.process = process
        self.processes = processes
        self.clock = clock
        self.bytes = mmap.mmap(file, FILE_BYTES)
        self._file = file
        self._taken_bytes = _HEAD_BYTES
        self._locks = 0
        self.run = self.run_of(process)
        """Which run of this process this is, counted by the parent."""

    def run_of(self, process: int) -> int:
        """Of another: what was written by an earlier run was left by the dead."""
        return int(_RUN.unpack_from(self.bytes, _RUN.size * process)[0])

    def take(self, size_bytes: int) -> int:
        """Where a part of so many bytes begins. All processes take the same parts in the same order."""
        at = self._taken_bytes
        self._taken_bytes += -(-size_bytes // _HEAD_BYTES) * _HEAD_BYTES
        assert self._taken_bytes <= FILE_BYTES
        return at

    def new_lock(self) -> JointLock:
        """All processes make the same locks in the same order. One excludes nobody who has another."""
        self._locks += 1
        return JointLock(self._file, self._locks, self.clock)


class JointLock:
    """Of the event loop of one process against those of others; not of threads, and not to be taken twice."""

    def __init__(self, file: int, place: int, clock: Clock) -> None:
        self._file = file
        self._place = place
        self._clock = clock
        self._held = False
        self._patient_from_s = 0.0

    def __enter__(self) -> None:
        self._held = self._try() or self._wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._held = False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait(self) -> bool:
        began_s = self._clock.monotonic_s()
        if began_s < self._patient_from_s:
            return False
        while self._clock.monotonic_s() - began_s < HELD_S_MAX:
            time.sleep(PAUSE_S)
            if self._try():
                return True
        self._patient_from_s = self._clock.monotonic_s() + UNLOCKED_S
        log.warning("another process of this router holds a lock and does not run: this one goes on without it")
        return False


def create_memory() -> int:
    """A file for `JointMemory`, to be inherited. It is gone with its last user."""
    file = os.memfd_create("whalepod-router")
    os.truncate(file, FILE_BYTES)
    return file


def note_ended(file: int, process: int) -> None:
    """A process has ended: what it held is free. For the parent alone, before another takes its place."""
    at = _RUN.size * process
    (run,) = _RUN.unpack(os.pread(file, _RUN.size, at))
    os.pwrite(file, _RUN.pack(run + 1), at)
