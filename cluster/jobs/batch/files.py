"""The files of a batch. The output is the record of what is done: it is only ever appended to, a line at a time, and a
job that was killed reads it and goes on.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}                            in
    {"id": "…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}  out
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from whalepod.core.errors import ConfigError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of an input file. Raises ConfigError that names the lines that are wrong, before any is sent."""
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    problems: list[str] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        parsed = _parse(line)
        if isinstance(parsed, str):
            problems.append(f"line {number}: {parsed}")
        elif parsed.custom_id in lines:
            problems.append(f"line {number}: custom_id {parsed.custom_id!r} is that of line {lines[parsed.custom_id]}")
        else:
            lines[parsed.custom_id] = number
            requests.append(parsed)
    if problems:
        shown = "; ".join(problems[:PROBLEMS_SHOWN])
        raise ConfigError(f"{path} has {len(problems)} wrong lines: {shown}")
    if not requests:
        raise ConfigError(f"--input {path} holds no request")
    return requests


def _parse(line: str) -> BatchRequest | str:
    """The request, or what is wrong with it."""
    try:
        values = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(values, dict):
        return "not a JSON object"
    custom_id, url, body = values.get("custom_id"), values.get("url"), values.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return "custom_id must be a text that is not empty"
    if values.get("method", "POST") != "POST":
        return f"method must be POST, not {values['method']!r}"
    if url not in ENDPOINTS:
        return f"url must be one of {', '.join(ENDPOINTS)}, not {url!r}"
    if not isinstance(body, dict):
        return "body must be an object"
    if body.get("stream"):
        return "body.stream must not be set: an answer is one line"
    return BatchRequest(custom_id, str(url), body)


@dataclass
class BatchOutput:
    """The output file of one job at a time."""

    path: Path
    done: dict[str, int] = field(default_factory=dict)
    """custom_id -> HTTP status, of every line that is there."""
    _descriptor: int = -1

    @classmethod
    def open(cls, path: Path) -> Self:
        """Take the file for this job, and read what an earlier one has done. A last line that it did not finish is cut
        off, and so are lines without an answer: those requests are sent again.

        Raises ConfigError if another job writes to it, or it is no output of a batch.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        output = cls(path, _descriptor=os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            fcntl.flock(output._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(output._descriptor)
            raise ConfigError(f"--output {path} is being written by another job") from None
        output._resume()
        return output

    def append(self, line: Mapping[str, Any]) -> None:
        """One finished request. On the disk when this returns."""
        data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fdatasync(self._descriptor)
        response = line["response"]
        self.done[str(line["custom_id"])] = 0 if response is None else int(response["status_code"])

    def close(self) -> None:
        os.close(self._descriptor)

    def _resume(self) -> None:
        kept: list[bytes] = []
        whole = self.path.read_bytes()
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                values = json.loads(line)
                custom_id, response = values["custom_id"], values["response"]
                status = 0 if response is None else int(response["status_code"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"line {number} of {self.path} is no line of a batch's output") from None
            if response is not None and custom_id not in self.done:
                self.done[custom_id] = status
                kept.append(line + b"\n")
        data = b"".join(kept)
        if data != whole:
            self._replace(data)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def _replace(self, data: bytes) -> None:
        """Cut where only the end is wrong; else write a file beside it first, so that no answer is ever in none."""
        if self.path.read_bytes().startswith(data):
            os.ftruncate(self._descriptor, len(data))
            return
        beside = self.path.with_suffix(self.path.suffix + ".resuming")
        beside.write_bytes(data)
        descriptor = os.open(beside, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.fsync(descriptor)
        beside.replace(self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor
