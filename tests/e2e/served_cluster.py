"""`whalepod serve` as a user runs it: another process, with ports and directories of its own."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.own_ports import with_own_ports
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.pool_settings import PrefillSettings
from whalepod.cluster.shipped_model import SHIPPED_MODEL_NAME
from whalepod.core.clock import Deadline
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

READY_S = 90.0


@dataclass(slots=True)
class ServedCluster:
    """A cluster that serves. `lines` is what it has printed so far."""

    process: subprocess.Popen[str]
    config: ClusterConfig
    arguments: list[str]
    environment: dict[str, str]
    lines: list[str] = field(default_factory=list)
    news: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.router.http_port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_for_line(self, pattern: str, *, timeout_s: float = READY_S) -> str:
        """The first line that matches. Fails with everything printed if none comes."""
        deadline = Deadline.after(timeout_s)
        for line in list(self.lines):
            if re.search(pattern, line):
                return line
        while not deadline.expired:
            try:
                line = self.news.get(timeout=deadline.remaining_s())
            except queue.Empty:
                break
            if line is None:
                break
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line matches {pattern!r} in\n" + "".join(self.lines))

    def descendants(self) -> set[psutil.Process]:
        return set(psutil.Process(self.process.pid).children(recursive=True))

    def pid_on_port(self, port: int) -> int:
        """Of our own descendant that listens there."""
        pid = self.try_pid_on_port(port)
        assert pid is not None, f"nobody of ours listens on port {port}"
        return pid

    def try_pid_on_port(self, port: int) -> int | None:
        for process in self.descendants():
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.Error:
                continue
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return process.pid
        return None

    def kill_on_port(self, port: int) -> int:
        """kill -9 whoever of ours listens there; returns its process id."""
        pid = self.pid_on_port(port)
        os.kill(pid, signal.SIGKILL)
        return pid


TAKEN = "is in use by another program"


@contextmanager
def served_cluster(
    directory: Path, *flags: str, shipped_model: bool = False, prefill_ranks: int = 1
) -> Generator[ServedCluster]:
    """A cluster that has said that it is ready. It is ended with the block, and nothing of it may be left."""
    cluster = start_serving(directory, *flags, shipped_model=shipped_model, prefill_ranks=prefill_ranks)
    try:
        line = cluster.wait_for_line(f"^ready after|{TAKEN}")
        if re.search(TAKEN, line):  # by a test of another worker, since they were found free
            end_serving(cluster)
            cluster = start_serving(directory, *flags, shipped_model=shipped_model, prefill_ranks=prefill_ranks)
            cluster.wait_for_line("^ready after")
        yield cluster
    finally:
        started = cluster.descendants() if cluster.process.poll() is None else set()
        end_serving(cluster)
        _, alive = psutil.wait_procs(started, timeout=15)
        assert not alive


def start_serving(directory: Path, *flags: str, shipped_model: bool = False, prefill_ranks: int = 1) -> ServedCluster:
    """Of random weights, so that no answer depends on what a model has learned, or with the model that ships."""
    config = with_own_ports(ClusterConfig(prefill=PrefillSettings(replicas=prefill_ranks)))
    flags = (*flags, "--prefill-replicas", str(prefill_ranks))
    if not shipped_model:
        if not (directory / "model").exists():
            write_tiny_checkpoint(directory / "model")
        flags = (*flags, "--model", str(directory / "model"), "--served-model-name", SHIPPED_MODEL_NAME)
        if "--dspark-draft-tokens" not in flags:
            flags = (*flags, "--dspark-draft-tokens", "5")
    ports = {
        "http": config.router.http_port,
        "grpc": config.router.grpc_port,
        "prefill": config.prefill.port,
        "decode": config.decode.port,
        "redis": config.redis_port,
    }
    arguments = [sys.executable, "-m", "whalepod", "serve", *flags]
    arguments += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    cluster = ServedCluster(process, config, arguments, environment)
    threading.Thread(target=_read, args=(cluster,), daemon=True).start()
    return cluster


def end_serving(cluster: ServedCluster) -> None:
    """SIGTERM, and for a test that has failed SIGKILL: the janitor does the rest."""
    if cluster.process.poll() is None:
        cluster.process.terminate()
        try:
            cluster.process.wait(45)
        except subprocess.TimeoutExpired:
            cluster.process.kill()
            cluster.process.wait()


def _read(cluster: ServedCluster) -> None:
    assert cluster.process.stdout is not None
    for line in cluster.process.stdout:
        cluster.news.put(line)
    cluster.news.put(None)
