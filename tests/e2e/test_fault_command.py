"""`whalepod fault` as an operator of a staging cluster types it, where processes speak TLS to clients and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.certificates import Authority
from tests.cluster.conftest import free_port
from tests.e2e.served_cluster import ServedCluster, served_cluster
from whalepod.cluster.api_keys import add_api_key
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.serve_lock import serving_record
from whalepod.core.clock import Deadline

pytestmark = pytest.mark.slow

PROMPT = "The whale swam on, and the sea was quiet about it. " * 12
VISION_PORT = 26_800


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    directory = tmp_path_factory.mktemp("staging")
    clients, peers = Authority(directory, "clients"), Authority(directory, "peers")
    own, peer = clients.issue("router"), peers.issue("peer")
    flags = ("--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key))
    flags += ("--tls-peer-cert-file", str(peer.cert), "--tls-peer-key-file", str(peer.key))
    flags += ("--tls-peer-ca-file", str(peers.pem), "--tls-peer-name", "localhost")
    keys = directory / "keys.yaml"
    key = add_api_key(keys, name="canary", tenant="canary", scopes=frozenset({"generate"}), expires=None)
    flags += (
        "--api-keys-file",
        str(keys),
        "--vision-replicas",
        "1",
        "--vision-port",
        str(VISION_PORT),
        "--fault-injection",
    )
    with served_cluster(directory, *flags) as cluster:
        cluster.environment["WHALEPOD_API_KEY"] = key
        yield cluster


def whalepod(cluster: ServedCluster, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "whalepod", *words, "--http-port", str(cluster.config.router.http_port)]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def config_file(cluster: ServedCluster) -> str:
    state = Path(cluster.environment["XDG_STATE_HOME"]) / "whalepod"
    record = serving_record(state, cluster.config.router.http_port)
    assert record is not None
    return record.config_file


def text(cluster: ServedCluster) -> str:
    url = f"https://127.0.0.1:{cluster.config.router.http_port}/v1/completions"
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "fidelity": "exact"}
    headers = {"x-api-key": cluster.environment["WHALEPOD_API_KEY"]}
    answer = httpx.post(url, json=body, headers=headers, verify=False, trust_env=False, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wait_until(met: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = Deadline.after(seconds)
    while not met():
        assert not deadline.expired


def test_a_vision_rank_is_delayed_spoilt_paused_and_killed(staging: ServedCluster) -> None:
    truth = text(staging)
    victim = psutil.Process(staging.pid_on_port(VISION_PORT))
    for kind in ("delay", "corrupt", "pause"):
        assert "has begun" in whalepod(staging, "fault", kind, "vision-0", "--seconds", "0.5")
    wait_until(lambda: victim.status() != psutil.STATUS_STOPPED)
    assert "has begun" in whalepod(staging, "fault", "kill", "vision-0")
    wait_until(lambda: staging.try_pid_on_port(VISION_PORT) not in (None, victim.pid))
    assert text(staging) == truth


def test_the_router_is_paused_and_killed_and_comes_back(staging: ServedCluster) -> None:
    truth = text(staging)
    assert "stores nothing" in whalepod(staging, "fault", "delay", "router", code=1)
    assert "has begun" in whalepod(staging, "fault", "pause", "router", "--seconds", "1")
    assert text(staging) == truth
    pid = staging.pid_on_port(staging.config.router.http_port)
    assert "has begun" in whalepod(staging, "fault", "kill", "router")
    wait_until(lambda: staging.try_pid_on_port(staging.config.router.http_port) not in (None, pid))
    wait_until(lambda: "serving" in whalepod(staging, "status"))


@contextmanager
def kv_service(config: str, port: int) -> Generator[psutil.Process]:
    command = [sys.executable, "-m", "whalepod", "kv", "serve", "--config", config, "--kv-port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def test_the_kv_service_is_paused_and_killed_and_stores_nothing_to_spoil(staging: ServedCluster) -> None:
    config, port = config_file(staging), free_port()
    assert load_config(file=Path(config)).fault_injection
    asked = ("--kv-port", str(port), "--config", config)
    assert "kv did not take the order" in whalepod(staging, "fault", "kill", "kv", *asked, code=1)
    with kv_service(config, port) as service:
        wait_until(lambda: any(c.laddr.port == port for c in service.net_connections(kind="tcp")))
        for kind in ("delay", "corrupt"):
            assert "stores nothing" in whalepod(staging, "fault", kind, "kv", *asked, code=1)
        assert "has begun" in whalepod(staging, "fault", "pause", "kv", "--seconds", "60", *asked)
        wait_until(lambda: service.status() == psutil.STATUS_STOPPED)
        os.kill(service.pid, signal.SIGCONT)
        assert "has begun" in whalepod(staging, "fault", "kill", "kv", *asked)
        assert service.wait(timeout=30) == -signal.SIGKILL


def test_the_canary_goes_through_a_router_that_speaks_tls_and_wants_keys(staging: ServedCluster) -> None:
    whalepod(staging, "canary", "--requests", "4")
    whalepod(staging, "canary", "--images", "--requests", "2")
