"""Where a process runs, and the way to end one that hangs: a rank that does not answer must not come back to life
among ranks that have gone on without it."""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_START_FIELD = 19
"""Of `/proc/PID/stat`, counted from the field behind the command: when the process started, in ticks."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    host: str
    pid: int
    start_ticks: int
    """0: unknown."""

    @classmethod
    def own(cls) -> ProcessPlace:
        return cls(socket.gethostname(), os.getpid(), _start_ticks(os.getpid()))

    def kill(self) -> bool:
        """End exactly this process. False: it is not on this machine, is gone, or its number belongs to another now."""
        if self.host != socket.gethostname() or self.start_ticks == 0 or _start_ticks(self.pid) != self.start_ticks:
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError as error:
            log.warning("process %d cannot be ended: %s", self.pid, error)
            return False
        return True


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[_START_FIELD])
