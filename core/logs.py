"""One log line per event, for people or for machines. Prompts, completions and secrets are never logged.

Callers log with the standard library and pass fields as `extra`: `log.warning("store is slow", extra={"op": "get"})`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
LIBRARIES = ("httpx", "httpcore")
"""Loggers of libraries that tell of every request: only their warnings are of interest."""

# What every record carries by itself. Whatever else it carries came through `extra`.
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure_logging(*, level: str = "info", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (standard error by default), replacing what was configured before.

    Raises ValueError if `level` is none of LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING if level in ("debug", "info") else level.upper())


class TextFormatter(logging.Formatter):
    """`time level logger: message key=value …`, with the traceback below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the standard library's name
        fields = "".join(f" {name}={_plain(value)}" for name, value in _extra_fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, the fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: _plain(value) for name, value in _extra_fields(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _extra_fields(record: logging.LogRecord) -> Mapping[str, object]:
    """Ray adds fields of its own, which start with an underscore."""
    fields = vars(record).items()
    return {name: value for name, value in fields if name not in _RECORD_FIELDS and not name.startswith("_")}


def _plain(value: object) -> str | int | float | bool | None:
    """Ids are bytes inside and hexadecimal outside; whatever JSON does not know becomes text."""
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
