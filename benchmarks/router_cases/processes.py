"""The processes of one measurement: Redis, stub ranks, the router, and a peer over HTTP stubs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from kv_cases.server import benchmark_server

from whalepod.core.clock import Deadline
from whalepod.model.tiny_checkpoint import SMALLEST, shipped_tokenizer, tiny_config_json

HERE = Path(__file__).parent.parent
PEERS = HERE.parent / ".bench-peers" / "sglang_router"
PEER = """
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

Router.from_args(RouterArgs(**json.loads(sys.argv[1]))).start()
"""
"""Without its launcher, which needs more packages than the router does."""
SECRET = "the secret of this benchmark"
PORT = 26_000
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Started:
    port: int
    process: psutil.Process
    stubs: Sequence[int]
    """gRPC ports of the stub ranks, if there are any."""

    def cpu_s(self) -> float:
        """Processor time of the process, all threads, and of its own processes."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


@contextmanager
def whalepod_router(
    directory: Path, *, step_ms: float, stubs: int = 2, processes: int = 1, port: int = PORT
) -> Generator[Started]:
    """`whalepod router` over stub decode ranks, found through a registry."""
    model = _model_files(directory)
    with ExitStack() as stack:
        redis = stack.enter_context(benchmark_server(port + 9))
        url = f"redis://127.0.0.1:{redis.tcp.port}/0"
        ports = [port + 40 + index for index in range(stubs)]
        for index, stub in enumerate(ports):
            words = ["--index", str(index), "--port", str(stub), "--redis-url", url, "--secret", SECRET]
            stack.enter_context(_running([*_module("router_cases.stub_rank"), *words, "--step-ms", str(step_ms)]))
        words = ["--model", str(model), "--served-model-name", "whale", "--secret", SECRET, "--redis-url", url]
        words += ["--http-port", str(port), "--grpc-port", str(port + 1), "--prefill-replicas", "0"]
        words += ["--max-concurrent-requests", "8192", "--log-level", "error"]
        admin_port = port + 10
        words += ["--processes", str(processes), "--admin-port", str(admin_port)]
        router = stack.enter_context(_running([*_module("whalepod"), "router", *words]))
        for index in range(processes):
            _wait_for(f"http://127.0.0.1:{admin_port + index}/readyz", router)
        yield Started(port, psutil.Process(router.pid), ports)


@contextmanager
def sglang_router(*, stubs: int = 2, port: int = PORT + 100) -> Generator[Started | None]:
    """The peer over HTTP stubs; None if `make bench-peers` has not fetched it."""
    if not PEERS.is_dir():
        yield None
        return
    with ExitStack() as stack:
        workers = [port + 10 + index for index in range(stubs)]
        for worker in workers:
            stack.enter_context(_running([*_module("router_cases.http_stub"), "--port", str(worker)]))
            _wait_for(f"http://127.0.0.1:{worker}/health", None)
        arguments = {
            "worker_urls": [f"http://127.0.0.1:{worker}" for worker in workers],
            "host": "127.0.0.1",
            "port": port,
            "policy": "round_robin",
            "prometheus_port": port + 2,
            "log_level": "error",
        }
        environment = {**os.environ, "PYTHONPATH": str(PEERS)}
        command = [sys.executable, "-c", PEER, json.dumps(arguments)]
        router = stack.enter_context(_running(command, environment))
        _wait_for(f"http://127.0.0.1:{port}/v1/models", router)
        yield Started(port, psutil.Process(router.pid), ())


def _model_files(directory: Path) -> Path:
    """What a router reads of a checkpoint, with a context of two million tokens."""
    tokenizer = shipped_tokenizer()
    overrides: dict[str, Any] = {**SMALLEST, "max_position_embeddings": 1 << 21}
    (directory / "config.json").write_text(json.dumps(tiny_config_json(tokenizer, block_tokens=256, **overrides)))
    (directory / "tokenizer.json").write_text(tokenizer.json)
    return directory


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


@contextmanager
def _running(command: Sequence[str], environment: dict[str, str] | None = None) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes] | None) -> None:
    deadline = Deadline.after(START_S)
    while not deadline.expired and (process is None or process.poll() is None):
        try:
            if httpx.get(url, trust_env=False, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            continue
    raise RuntimeError(f"{url} does not answer")
