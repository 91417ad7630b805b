"""A whole cluster whose processes speak TLS to each other: served, looked at, made to fail, served again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.certificates import Authority
from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_faults import ask, text_of, wait_until_whole

pytestmark = pytest.mark.slow

PROMPT = "The whale swam on, and the sea was quiet about it. " * 12


def whalepod(cluster: ServedCluster, *words: str) -> str:
    command = [sys.executable, "-m", "whalepod", *words, "--http-port", str(cluster.config.router.http_port)]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_cluster_serves_over_mutual_tls_and_its_tools_reach_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "cluster-ca")
    pair = authority.issue("peer")
    flags = ("--tls-peer-cert-file", str(pair.cert), "--tls-peer-key-file", str(pair.key))
    flags += ("--tls-peer-ca-file", str(authority.pem), "--tls-peer-name", "localhost", "--fault-injection")
    with served_cluster(tmp_path, *flags) as cluster:
        truth = text_of(ask(cluster, PROMPT))
        status = whalepod(cluster, "status")
        assert status.count("serving") >= 2, status
        pid = cluster.pid_on_port(cluster.config.decode.port)
        whalepod(cluster, "fault", "kill", "decode-0")
        wait_until_whole(cluster, without_pid=pid)
        assert text_of(ask(cluster, PROMPT)) == truth
