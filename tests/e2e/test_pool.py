"""Pools that grow, shrink and get new processes while clients stream."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_faults import pieces, wait_until_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pool(cluster: ServedCluster, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whalepod", "pool", *map(str, words)]
    command += ["--http-port", str(cluster.config.router.http_port)]
    return subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=180, check=False)


def decode_ranks(cluster: ServedCluster) -> int:
    with cluster.client() as client:
        return client.get("/readyz").json()["pools"]["decode"]["ranks"]


@contextmanager
def streaming(cluster: ServedCluster) -> Generator[list[str]]:
    """One client that streams answer after answer. Gives the answers; fails if one breaks off."""
    answers: list[str] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        body = {"prompt": "The whale swam", "max_tokens": 24, "temperature": 0, "stream": True, "fidelity": "exact"}
        try:
            while not stop.is_set():
                with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
                    answers.append("".join(pieces(response)))
        except BaseException as error:  # noqa: BLE001  the test looks at it
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join(60)
    assert not failures, failures


def test_a_pool_changes_under_streams_that_notice_nothing(tmp_path: Path) -> None:
    with served_cluster(tmp_path) as cluster:
        wait_until_whole(cluster)
        first = cluster.pid_on_port(cluster.config.decode.port)
        with streaming(cluster) as answers:
            more = pool(cluster, "scale", "decode", 2)
            assert more.returncode == 0, more.stdout
            assert "decode-1 is ready" in more.stdout
            replaced = pool(cluster, "replace", "decode")
            assert replaced.returncode == 0, replaced.stdout
            fewer = pool(cluster, "scale", "decode", 1)
            assert fewer.returncode == 0, fewer.stdout
        assert len(set(answers)) == 1
        assert cluster.pid_on_port(cluster.config.decode.port) != first
        assert cluster.try_pid_on_port(cluster.config.decode.port + 1) is None
        assert decode_ranks(cluster) == 1
        refused = pool(cluster, "scale", "decode", 0)
        assert refused.returncode == 1
        assert "decode.replicas" in refused.stdout
        assert json.loads(cluster.client().get("/readyz").text)["status"] == "ready"
