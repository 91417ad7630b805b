"""Real Redis servers for tests: each in its own folder, on its own port, ended by whoever started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from whalepod.cluster.embedded_redis import carried_redis_server, server_pid, server_version
from whalepod.core.clock import Deadline
from whalepod.kvstore.settings import StoreAddress

PORTS = range(20000, 32000)
"""Below the range from which the kernel takes the ports of clients."""


def redis_binaries() -> dict[str, Path]:
    """What this machine can run, one a version: the one that comes with a package, and those on the path."""
    found: dict[str, Path] = {}
    on_path = (Path(folder) / "redis-server" for folder in os.get_exec_path())
    for binary in (carried_redis_server(), *on_path):
        version = server_version(binary) if binary and binary.is_file() else None
        if binary and version:
            found.setdefault(f"redis-{version[0]}.{version[1]}", binary)
    return found


CLUSTER_BUS_OFFSET = 10_000
"""A member of a Redis Cluster listens for its peers at its port plus this."""
CLUSTER_PORTS = range(20000, 32768 - CLUSTER_BUS_OFFSET)


def free_port(ports: range = PORTS, *, also_at: int = 0) -> int:
    """A port of `ports` that is free, as is the port `also_at` above it; handed out once in this process."""
    start = (os.getpid() * 37) % len(ports)
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        if port not in _handed_out and _is_free(port) and _is_free(port + also_at):
            _handed_out.add(port)
            return port
    raise RuntimeError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_handed_out: set[int] = set()


@dataclass
class RedisServer:
    """A server that can be killed, stopped in its tracks, and started again on the same port."""

    binary: Path
    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(host="127.0.0.1", port=self.port)

    @property
    def unix_address(self) -> StoreAddress:
        return StoreAddress(path=str(self.folder / "s"))

    def start(self) -> RedisServer:
        version = server_version(self.binary)
        debug = ["--enable-debug-command", "yes"] if version and version >= (7, 0) else []
        command = [str(self.binary), "--port", str(self.port), "--save", "", "--dir", str(self.folder)]
        command += ["--bind", "127.0.0.1", "--unixsocket", str(self.folder / "s"), *debug, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = Deadline.after(10)
        while server_pid(self.address, deadline=deadline.earlier(0.5)) != self.process.pid:
            if deadline.expired or self.process.poll() is not None:
                raise RuntimeError(f"{self.binary} did not start")
        return self

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=10)

    def call(self, *words: Any) -> Any:
        """One command through an independent client."""
        with self.client() as client:
            return client.execute_command(*words)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """As if the machine hung: connections stay, nothing answers."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)
