"""One local cluster per HTTP port: who serves, and where other commands find its settings."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True)
class ServeRecord:
    """What a serving process says of itself. `config_file` is a YAML file of its settings, with the secret's file."""

    pid: int
    http_url: str
    config_file: str


class AlreadyServingError(Exception):
    """Another process serves on this port. `record` is what it has said of itself, if it has got that far."""

    def __init__(self, http_port: int, record: ServeRecord | None) -> None:
        who = f" (process {record.pid}, {record.http_url})" if record is not None else ""
        super().__init__(f"a cluster already serves on port {http_port}{who}")
        self.record = record


class ServeLock:
    """Held while a cluster serves. The system releases it when the process ends, however it ends."""

    def __init__(self, state_dir: Path, http_port: int) -> None:
        self._http_port = http_port
        self._path = _record_path(state_dir, http_port)
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises AlreadyServingError if another process holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise AlreadyServingError(self._http_port, _read(self._path)) from None
        file.truncate(0)
        self._file = file

    def publish(self, *, http_url: str, config_file: Path) -> None:
        """Say what is served here. Needs the lock."""
        assert self._file is not None
        record = ServeRecord(pid=os.getpid(), http_url=http_url, config_file=str(config_file))
        self._file.truncate(0)
        self._file.write(json.dumps(asdict(record)))
        self._file.flush()

    def release(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def serving_record(state_dir: Path, http_port: int) -> ServeRecord | None:
    """The cluster that serves on `http_port` of this machine now, if this user has started one."""
    lock = ServeLock(state_dir, http_port)
    try:
        lock.acquire()
    except AlreadyServingError as error:
        return error.record
    lock.release()
    return None


def _record_path(state_dir: Path, http_port: int) -> Path:
    return state_dir / f"serve-{http_port}.json"


def _read(path: Path) -> ServeRecord | None:
    try:
        return ServeRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # it has only just started
