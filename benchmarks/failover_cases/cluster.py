"""A whole cluster of real processes for a benchmark, and the means to kill any of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from whalepod.cluster.config import METRICS_PORT_OFFSET, ClusterConfig
from whalepod.cluster.free_ports import with_free_ports
from whalepod.core.clock import SYSTEM_CLOCK, Deadline

READY_S = 180.0
WHOLE_S = 120.0


@dataclass(slots=True)
class RunningCluster:
    process: subprocess.Popen[bytes]
    config: ClusterConfig

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.router.http_port}"

    def port_of(self, name: str) -> int:
        """`decode-1`, `prefill-0`, `redis`."""
        if name == "redis":
            return self.config.redis_port
        pool, index = name.rsplit("-", 1)
        return self.config.pool(pool).port + int(index)

    def pid_of(self, name: str) -> int | None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.Error:
                continue
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port_of(name) for c in connections):
                return process.pid
        return None

    def signal(self, name: str, number: signal.Signals) -> float:
        """Send it a signal; returns when (monotonic seconds)."""
        pid = self.pid_of(name)
        assert pid is not None, f"{name} is not running"
        now_s = SYSTEM_CLOCK.monotonic_s()
        os.kill(pid, number)
        return now_s

    def wait_until_whole(self, names: list[str]) -> None:
        """Until all of them listen and the router lists them."""
        deadline = Deadline.after(WHOLE_S)
        ranks = {name for name in names if name != "redis"}
        while not deadline.expired:
            listed = {worker["rank"] for worker in httpx.get(f"{self.url}/workers", trust_env=False).json()["workers"]}
            if ranks <= listed and all(self.pid_of(name) for name in names):
                return
        raise TimeoutError(f"not whole after {WHOLE_S:.0f} s: {names}")

    def streams_moved(self) -> int:
        """Streams that lost their decode rank after a token and went on elsewhere, since the router started."""
        metrics = httpx.get(f"{self.url}/metrics", trust_env=False).text
        (moved,) = re.findall(r"^whalepod_router_failovers_total (\S+)$", metrics, flags=re.M)
        return int(float(moved))

    def blocks_in_use(self, name: str) -> int:
        """KV blocks that somebody holds on a rank: idle cached ones are free."""
        metrics = httpx.get(
            f"http://127.0.0.1:{self.port_of(name) + METRICS_PORT_OFFSET}/metrics", trust_env=False
        ).text
        (used,) = re.findall(r"^whalepod_rank_kv_blocks_used (\S+)$", metrics, flags=re.M)
        return int(float(used))


@contextmanager
def running_cluster(directory: Path, *, prefill: int, decode: int, vision: int = 0) -> Generator[RunningCluster]:
    """`whalepod serve` with so many ranks and the model that ships; ended with the block."""
    pools = {"prefill": prefill, "decode": decode, "vision": vision}
    config = ClusterConfig.model_validate({name: {"replicas": replicas} for name, replicas in pools.items()})
    config = with_free_ports(config, search_from=24_000)
    router = config.router
    flags = {
        "--prefill-replicas": prefill,
        "--decode-replicas": decode,
        "--prefill-port": config.prefill.port,
        "--decode-port": config.decode.port,
        "--prefill-cpus": 0.1,
        "--decode-cpus": 0.1,
        "--decode-slots": 32,
        "--vision-replicas": vision,
        "--vision-port": config.vision.port,
        "--vision-cpus": 0.1,
        "--http-port": router.http_port,
        "--grpc-port": router.grpc_port,
        "--redis-port": config.redis_port,
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    environment = {**os.environ, "XDG_STATE_HOME": str(directory / "state"), "PYTHONUNBUFFERED": "1"}
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "whalepod", "serve", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    cluster = RunningCluster(process, config)
    try:
        _wait_until_ready(cluster, directory / "serve.log")
        yield cluster
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(cluster: RunningCluster, log: Path) -> None:
    deadline = Deadline.after(READY_S)
    while not deadline.expired:
        if re.search(rb"^ready after", log.read_bytes(), flags=re.M):
            return
        try:
            cluster.process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise RuntimeError(f"the cluster did not start:\n{log.read_text(errors='replace')[-2000:]}")
