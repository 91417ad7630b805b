"""A batch against a real HTTP server, and its files through kills and second starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whalepod.cluster.jobs.batch.files import BatchOutput, read_requests
from whalepod.cluster.jobs.batch.sending import SendingOptions, send_all
from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError


class EchoServer(ThreadingHTTPServer):
    """Answers with the prompt. The first answer to a prompt named in `refusals` is that status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.asked: Counter[str] = Counter()
        self.refusals: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.open_for = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class EchoHandler(BaseHTTPRequestHandler):
    server: EchoServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._send(200, {"status": "ready"})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        self.server.asked[prompt] += 1
        if sum(self.server.asked.values()) > self.server.open_for:
            self.server.gate.wait(20)
        status = self.server.refusals.pop(prompt, 200)
        self._send(status, {"echo": prompt, "usage": {"completion_tokens": 3}})

    def log_message(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  quiet
        pass

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("x-request-id", "r1")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.gate.set()
        running.shutdown()


def write_input(path: Path, count: int) -> Path:
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"p{n}"}})
        for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def send(directory: Path, server: EchoServer, concurrency: int = 32, console: Console | None = None) -> Any:
    output = BatchOutput.open(directory / "out.jsonl")
    try:
        requests = read_requests(directory / "in.jsonl")
        options = SendingOptions(concurrency=concurrency)
        return await send_all(requests, output, url=server.url, options=options, console=console or Console(quiet=True))
    finally:
        output.close()


async def test_every_request_gets_one_line_in_the_published_form(tmp_path: Path, server: EchoServer) -> None:
    write_input(tmp_path / "in.jsonl", 20)
    with (tmp_path / "log").open("w") as log:
        counts = await send(tmp_path, server, concurrency=4, console=Console(file=log, width=120))
    assert (counts.done, counts.failed, counts.completion_tokens) == (20, 0, 60)
    assert re.fullmatch(
        r"batch: 20 requests in \S+ s, \S+ requests/s, \S+ tokens/s, 0 failed\n", (tmp_path / "log").read_text()
    )
    lines = {line["custom_id"]: line for line in lines_of(tmp_path / "out.jsonl")}
    assert set(lines) == {f"r{n}" for n in range(20)}
    assert lines["r7"]["response"] == {
        "status_code": 200,
        "request_id": "r1",
        "body": {"echo": "p7", "usage": {"completion_tokens": 3}},
    }
    assert lines["r7"]["error"] is None


async def test_a_refusal_that_passes_is_tried_again_and_one_that_does_not_is_told(
    tmp_path: Path, server: EchoServer
) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    server.refusals = {"p0": 503, "p1": 400}
    counts = await send(tmp_path, server)
    assert counts.failed == 1
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in lines_of(tmp_path / "out.jsonl")}
    assert statuses == {"r0": 200, "r1": 400, "r2": 200}


async def test_a_second_start_sends_only_what_is_missing(tmp_path: Path, server: EchoServer) -> None:
    write_input(tmp_path / "in.jsonl", 6)
    await send(tmp_path, server)
    written = (tmp_path / "out.jsonl").read_bytes().split(b"\n")
    (tmp_path / "out.jsonl").write_bytes(b"\n".join(written[:3]) + b"\n" + written[3][:20])
    counts = await send(tmp_path, server)
    assert (counts.done, counts.completion_tokens) == (6, 9), "tokens of this run"
    assert sorted(line["custom_id"] for line in lines_of(tmp_path / "out.jsonl")) == [f"r{n}" for n in range(6)]
    assert sum(server.asked.values()) == 9


async def test_requests_that_got_no_answer_are_sent_again(tmp_path: Path, server: EchoServer) -> None:
    write_input(tmp_path / "in.jsonl", 2)
    lost = {"id": "x", "custom_id": "r0", "response": None, "error": {"code": "no_answer", "message": "reset"}}
    kept = {"id": "y", "custom_id": "r1", "response": {"status_code": 200, "request_id": "", "body": {}}, "error": None}
    (tmp_path / "out.jsonl").write_text(json.dumps(lost) + "\n" + json.dumps(kept) + "\n", encoding="utf-8")
    await send(tmp_path, server)
    assert [line["custom_id"] for line in lines_of(tmp_path / "out.jsonl")] == ["r1", "r0"]
    assert server.asked == {"p0": 1}


def test_one_job_at_a_time_writes_an_output(tmp_path: Path) -> None:
    first = BatchOutput.open(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="another job"):
        BatchOutput.open(tmp_path / "out.jsonl")
    first.close()
    BatchOutput.open(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ('{"url": "/v1/completions", "body": {}}', "custom_id"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "url must be one of"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', "body must be an object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
        ('{"custom_id": "r1", "url": "/v1/completions", "body": {}}', "that of line 2"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_sent(tmp_path: Path, line: str, what: str) -> None:
    path = write_input(tmp_path / "in.jsonl", 2)
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 3: .*{what}"):
        read_requests(path)


def start(directory: Path, server: EchoServer) -> subprocess.Popen[str]:
    words = ["--input", directory / "in.jsonl", "--output", directory / "out.jsonl", "--url", server.url]
    return subprocess.Popen(
        [sys.executable, "-m", "whalepod.cluster.jobs.batch", *map(str, words), "--concurrency", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_job_that_was_killed_resumes_without_losing_or_repeating_a_line(tmp_path: Path, server: EchoServer) -> None:
    write_input(tmp_path / "in.jsonl", 12)
    server.open_for = 5
    server.gate.clear()
    first = start(tmp_path, server)
    deadline = Deadline.after(30)
    while sum(server.asked.values()) < 7 and not deadline.expired:
        pass  # five are answered, two are on their way
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    before = lines_of(tmp_path / "out.jsonl")
    assert 0 < len(before) < 12
    server.gate.set()
    second = start(tmp_path, server)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert json.loads(said.splitlines()[-1])["requests"] == 12
    after = lines_of(tmp_path / "out.jsonl")
    assert after[: len(before)] == before
    assert sorted(line["custom_id"] for line in after) == sorted(f"r{n}" for n in range(12))


@pytest.mark.slow
def test_the_exit_code_tells_a_failed_request_and_a_wrong_input(tmp_path: Path, server: EchoServer) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    server.refusals = {"p0": 400}
    failing = start(tmp_path, server)
    failing.communicate(timeout=60)
    assert failing.returncode == 1
    (tmp_path / "in.jsonl").write_text("{", encoding="utf-8")
    wrong = start(tmp_path, server)
    said, _ = wrong.communicate(timeout=60)
    assert wrong.returncode == 2
    assert "line 1" in said
