"""`ray job submit` against a real head, as the README says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.conftest import free_port
from tests.cluster.jobs.test_batch import EchoServer, lines_of, write_input
from tests.house_rules import ROOT
from whalepod.core.clock import Deadline

pytestmark = pytest.mark.slow

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENVIRONMENT = {
    **os.environ,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}

WAIT = threading.Event()  # never set


@pytest.fixture
def job_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head's job server."""
    with running_head(tmp_path_factory.mktemp("head")) as (address, _):
        yield address


@contextmanager
def running_head(directory: Path) -> Generator[tuple[str, psutil.Process]]:
    """The address of its job server, and its process. It may be killed meanwhile."""
    port, dashboard = free_port(), free_port()
    words = [*RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
    words += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--object-store-memory=83886080"]
    words += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    log = (directory / "log").open("w")
    head = subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = Deadline.after(60)
        while not _answers(address):
            assert not deadline.expired
            assert head.poll() is None
        yield address, psutil.Process(head.pid)
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        log.close()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/api/version", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def submit(address: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*RAY, "job", "submit", "--address", address, "--working-dir", str(ROOT), "--", sys.executable, "-m"]
    return subprocess.run(
        [*command, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_submitted_batch_answers_every_line_and_its_exit_code_is_the_jobs(tmp_path: Path, job_server: str) -> None:
    with EchoServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_input(tmp_path / "in.jsonl", 8)
        files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--url", server.url)
        good = submit(job_server, "whalepod.cluster.jobs.batch", *files)
        server.shutdown()
    assert good.returncode == 0, good.stdout + good.stderr
    assert json.dumps({"requests": 8, "failed": 0, "output": str(tmp_path / "out.jsonl")}) in good.stdout
    assert len(lines_of(tmp_path / "out.jsonl")) == 8
    wrong = submit(job_server, "whalepod.cluster.jobs.batch", "--input", tmp_path / "none", "--output", tmp_path / "o")
    assert wrong.returncode == 1
    assert "exit code 2" in wrong.stdout + wrong.stderr


def test_fault_f14_a_job_outlives_its_submitter_and_the_exit_code_comes_from_its_status(
    tmp_path: Path, job_server: str
) -> None:
    with EchoServer() as server:
        server.gate.clear()  # an answer takes 20 s, or until it is set
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_input(tmp_path / "in.jsonl", 8)
        words = ["--submission-id", "outlives", "--working-dir", str(ROOT), "--", sys.executable, "-m"]
        words += ["whalepod.cluster.jobs.batch", "--input", str(tmp_path / "in.jsonl")]
        words += ["--output", str(tmp_path / "out.jsonl"), "--url", server.url]
        command = [*RAY, "job", "submit", "--address", job_server, *words]
        submitter = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = Deadline.after(90)
        while not server.asked and not deadline.expired:
            WAIT.wait(0.1)
        submitter.kill()  # and with it goes its log stream
        submitter.wait()
        assert _job(job_server, "outlives")["status"] == "RUNNING"
        server.gate.set()
        while (job := _job(job_server, "outlives"))["status"] == "RUNNING" and not deadline.expired:
            WAIT.wait(0.1)
        server.shutdown()
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert len(lines_of(tmp_path / "out.jsonl")) == 8


def test_fault_f12_a_job_ends_with_its_head_and_goes_on_where_it_was_under_the_next(tmp_path: Path) -> None:
    with EchoServer() as server, running_head(tmp_path) as (address, head):
        server.open_for = 5
        server.gate.clear()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_input(tmp_path / "in.jsonl", 12)
        output = tmp_path / "out.jsonl"
        words = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--url", server.url]
        command = [*RAY, "job", "submit", "--address", address, "--submission-id", "first", "--working-dir", str(ROOT)]
        command += ["--", sys.executable, "-m", "whalepod.cluster.jobs.batch", *words]
        submitter = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = Deadline.after(90)
        while (sum(server.asked.values()) < 7 or output.read_bytes().count(b"\n") < 5) and not deadline.expired:
            WAIT.wait(0.1)  # five are answered, two are on their way
        for process in (*head.children(recursive=True), head):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert submitter.wait(60) != 0, "a job without a head looks done"
        while _drivers(output) and not deadline.expired:
            WAIT.wait(0.1)
        assert _drivers(output) == [], "a job without a head goes on"
        before = lines_of(output)
        server.gate.set()
        with running_head(tmp_path) as (again, _):
            assert httpx.get(f"{again}/api/jobs/first", timeout=10, trust_env=False).status_code == 404
            second = submit(again, "whalepod.cluster.jobs.batch", *words)
        server.shutdown()
    assert second.returncode == 0, second.stdout + second.stderr
    assert lines_of(output)[: len(before)] == before
    assert sorted(line["custom_id"] for line in lines_of(output)) == sorted(f"r{n}" for n in range(12))


def _drivers(output: Path) -> list[int]:
    """Of jobs that write there."""
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if str(output) in (process.info["cmdline"] or ())]


def _job(address: str, name: str) -> dict[str, Any]:
    return httpx.get(f"{address}/api/jobs/{name}", timeout=10, trust_env=False).json()
