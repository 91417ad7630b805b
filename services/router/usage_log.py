"""What each request used, for whoever sends the bills: one JSON object a line, and never a word of its text.

request ends ─▶ write (a queue) ─▶ a thread ─▶ file, opened again when it has been rotated away
"""

from __future__ import annotations

import json
import logging
import queue
from dataclasses import dataclass
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path

from prometheus_client import Counter

from whalepod.core.errors import ConfigError

from .tenancy import Principal
from .usage import Usage

WAITING_MAX = 100_000
"""Records that a slow disk may hold up; more are dropped, and counted."""

DROPPED = Counter("whalepod_router_usage_records_dropped", "Usage records that could not be written.")


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One request that has ended."""

    time_unix_ms: int
    principal: Principal
    endpoint: str
    request_id: str
    outcome: str
    usage: Usage

    def to_json(self) -> str:
        return json.dumps(
            {
                "time_unix_ms": self.time_unix_ms,
                "tenant": self.principal.tenant,
                "key": self.principal.key_name,
                "user": self.principal.user,
                "endpoint": self.endpoint,
                "request": self.request_id,
                "outcome": self.outcome,
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "reasoning_tokens": self.usage.reasoning_tokens or 0,
            }
        )


class UsageLog:
    """Appends to one file. `write` never waits; `close` writes what is left."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            handler = WatchedFileHandler(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"router.usage_file {file} cannot be written: {error.strerror}") from None
        handler.setFormatter(logging.Formatter("%(message)s"))
        waiting: queue.Queue[logging.LogRecord] = queue.Queue(WAITING_MAX)
        self._in = _Counting(waiting)
        self._handler = handler
        self._out = QueueListener(waiting, handler)
        self._out.start()

    def write(self, record: UsageRecord) -> None:
        self._in.emit(logging.LogRecord("usage", logging.INFO, "", 0, record.to_json(), None, None))

    def close(self) -> None:
        self._out.stop()
        self._handler.close()


class _Counting(QueueHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        del record
        DROPPED.inc()
