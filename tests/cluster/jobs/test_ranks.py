"""Ranks alone, as a job in a Ray that was there before, register at their own machine's address."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import free_port
from tests.cluster.jobs.test_submit import ENVIRONMENT, RAY, WAIT
from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.registry import RegistryWatcher
from whalepod.core.clock import Deadline
from whalepod.core.credentials import ClusterSecret

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECRET = "a secret of a test cluster"


@pytest.fixture
def ray_address(tmp_path: Path) -> Iterator[str]:
    """A head that has room for one rank of each pool."""
    port = free_port()
    words = [*RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
    words += ["--include-dashboard=false", "--object-store-memory=83886080"]
    words += [f"--ray-client-server-port={free_port()}"]
    words += ['--resources={"whalepod_prefill": 1, "whalepod_decode": 1}']
    with (tmp_path / "log").open("w") as log:
        head = subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = Deadline.after(60)
            while "Ray runtime started" not in (tmp_path / "log").read_text():
                assert not deadline.expired
                assert head.poll() is None
                WAIT.wait(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            head.send_signal(signal.SIGTERM)
            try:
                head.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)


async def registered(redis_url: str, count: int, job: subprocess.Popen[str]) -> list[RankInfo]:
    watcher = RegistryWatcher(redis_url=redis_url, secret=ClusterSecret(SECRET.encode()), poll_s=0.2)
    await watcher.start()
    try:
        deadline = Deadline.after(90)
        while len(watcher.ranks) != count:
            assert not deadline.expired
            assert count == 0 or job.poll() is None, job.stdout.read() if job.stdout else ""
            await asyncio.sleep(0.2)
        return sorted(watcher.ranks.values(), key=lambda rank: rank.rank_id)
    finally:
        await watcher.stop()


def start_ranks(ray_address: str, redis_url: str, **changes: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """The job and its settings."""
    settings = {
        "redis_url": redis_url,
        "secret": SECRET,
        "host": "0.0.0.0",
        "ranks_apart": "true",
        "ray.address": ray_address,
        "ray.pool_resources": "true",
        "prefill.port": str(free_port()),
        "decode.port": str(free_port()),
        "engine.context_tokens_max": "512",
        "kv.direct": "false",
        **changes,
    }
    command = [sys.executable, "-m", "whalepod.cluster.jobs.ranks"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    job = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return job, settings


def test_ranks_start_in_a_ray_that_is_there_and_leave_when_their_job_is_stopped(
    ray_address: str, redis_server: EmbeddedRedis
) -> None:
    redis_url = f"redis://127.0.0.1:{redis_server.address.port}/0"
    job, settings = start_ranks(ray_address, redis_url)
    try:
        decode, prefill = asyncio.run(registered(redis_url, 2, job))
        assert decode.address == f"127.0.0.1:{settings['decode.port']}"
        assert prefill.address == f"127.0.0.1:{settings['prefill.port']}"
        job.send_signal(signal.SIGTERM)
        assert asyncio.run(registered(redis_url, 0, job)) == []
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 0, output
    finally:
        job.kill()
        job.wait()


def test_a_pool_that_ray_has_no_room_for_says_what_is_missing(ray_address: str, redis_server: EmbeddedRedis) -> None:
    redis_url = f"redis://127.0.0.1:{redis_server.address.port}/0"
    job, _ = start_ranks(ray_address, redis_url, **{"decode.replicas": "2"})
    try:
        assert job.stdout is not None
        said = next(line for line in job.stdout if "waits for a place" in line)
        assert said.startswith("decode waits for a place in Ray: 2 x 1 CPU, 1 whalepod_decode on any machines, and not")
        assert "1 whalepod_decode; add machines, or lower decode.replicas" in said
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 0, output
    finally:
        job.kill()
        job.wait()


def test_ranks_without_a_redis_are_refused() -> None:
    command = [sys.executable, "-m", "whalepod.cluster.jobs.ranks", "--set", f"secret={SECRET}"]
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "redis_url" in refused.stdout
