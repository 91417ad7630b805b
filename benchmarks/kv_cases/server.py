"""A Redis server for one benchmark: TCP on the loopback interface and a unix socket, nothing kept."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from whalepod.cluster.embedded_redis import find_redis_server, refuse_busy_port, server_pid, server_version
from whalepod.core.clock import Deadline
from whalepod.kvstore.settings import StoreAddress

START_S = 10.0


@dataclass(frozen=True, slots=True)
class BenchmarkServer:
    tcp: StoreAddress
    unix: StoreAddress
    version: str


@contextmanager
def benchmark_server(port: int) -> Generator[BenchmarkServer]:
    """Raises ConfigError if there is no server or the port is taken, RuntimeError if it does not start."""
    binary = find_redis_server()
    refuse_busy_port(port)
    with tempfile.TemporaryDirectory(prefix="whalepod-kv-") as folder:
        path = Path(folder) / "redis.sock"
        options = {"port": str(port), "bind": "127.0.0.1", "unixsocket": str(path), "dir": folder, "save": ""}
        command = [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            tcp = StoreAddress(host="127.0.0.1", port=port)
            deadline = Deadline.after(START_S)
            while server_pid(tcp, deadline=deadline.earlier(1.0)) != process.pid:
                if deadline.expired or process.poll() is not None:
                    raise RuntimeError(f"{binary} did not start")
            version = ".".join(map(str, server_version(binary) or ()))
            yield BenchmarkServer(tcp=tcp, unix=StoreAddress(path=str(path)), version=version)
        finally:
            process.kill()
            process.wait()
