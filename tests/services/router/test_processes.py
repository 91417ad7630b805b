"""Several router processes on one port (`router.processes`): real signals to them and to their parent."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.services.router.fake_ranks import SECRET, Behaviour, FakeDecode
from tests.services.router.router_under_test import router_config, until
from tests.services.router.test_process import body, config, http_client, read_stream, registered
from whalepod.cli.router import HUNG_AFTER_S
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.free_ports import with_free_ports

__all__ = ["config"]

pytestmark = pytest.mark.slow

WAIT_S = 90.0
"""For processes that are started, answer or end: on a busy machine they wait for a processor while a test counts."""


class Processes:
    """A router of several processes that share their ports, and one operators' page each."""

    def __init__(self, config: ClusterConfig, directory: Path, count: int = 2, **router: Any) -> None:
        self.config = config
        # Of a pool of as many: it has ports that follow each other.
        spare = with_free_ports(router_config(config.model_dir, prefill_replicas=count), search_from=24_000)
        admin_port = spare.prefill.port
        settings: dict[str, Any] = config.model_dump(mode="json", exclude_none=True) | {"secret": SECRET.key.decode()}
        settings["router"] |= {
            "processes": count,
            "admin_port": admin_port,
            "usage_file": str(directory / "usage.jsonl"),
            "drain_seconds": 60.0,
            "queue_timeout_seconds": WAIT_S,
            "request_timeout_seconds": 2 * WAIT_S,
            **router,
        }
        settings["prefill"]["replicas"] = 0
        self._log = directory / "log"
        self._file = directory / "cluster.json"
        self._file.write_text(json.dumps(settings))
        self.pages = [f"http://127.0.0.1:{admin_port + index}" for index in range(count)]
        self._started: list[asyncio.subprocess.Process] = []

    async def start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "whalepod", "router", "--config", str(self._file))
        with self._log.open("ab") as log:  # no pipe: it would stay open for as long as an orphan lives
            process = await asyncio.create_subprocess_exec(*command, stderr=log)
        self._started.append(process)
        return process

    async def until_all_are_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await self._ready():
                await asyncio.sleep(0.05)

    async def _ready(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as operator:  # a connection may be that of an orphan
                return all([(await operator.get(f"{page}/readyz")).is_success for page in self.pages])
        except httpx.HTTPError:
            return False

    async def ask(self) -> None:
        async with http_client(self.config, timeout_s=WAIT_S) as client:
            answer = await client.post("/v1/completions", json=body())
            assert answer.is_success, answer.text

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def end(self) -> None:
        """Of a test that has failed, too: one that was stopped does not see that its parent is gone."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self._file) in (process.info["cmdline"] or ()):
                process.kill()
        for started in self._started:
            await started.wait()


@pytest.fixture
async def processes(config: ClusterConfig, tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(config, tmp_path)
    try:
        yield processes
    finally:
        await processes.end()
        assert "Traceback" not in processes.log, processes.log


async def test_processes_share_a_port_show_themselves_to_operators_and_drain_together(
    processes: Processes, tmp_path: Path
) -> None:
    """One of them is killed in between: the others serve, and it comes back."""
    decode = FakeDecode()
    async with registered(processes.config, [decode]), httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as operator:
        process = await processes.start()
        await processes.until_all_are_ready()
        await asyncio.gather(*(processes.ask() for _ in range(40)))
        counted = [_requests((await operator.get(f"{page}/metrics")).text) for page in processes.pages]
        assert sum(counted) == 40
        assert min(counted) > 0
        assert (await operator.delete(f"{processes.pages[0]}/workers/decode-0")).is_success
        told = [(await operator.get(f"{page}/workers")).json()["workers"] for page in processes.pages]
        assert [worker["draining"] for (worker,) in told] == [True, True]
        assert (await operator.post(f"{processes.pages[1]}/workers", json={"rank": "decode-0"})).is_success
        victim, _ = psutil.Process(process.pid).children()
        victim.kill()
        await until(lambda: victim not in psutil.Process(process.pid).children(), timeout_s=WAIT_S)
        await processes.ask()
        await processes.until_all_are_ready()
        decode.behaviour = Behaviour(step=asyncio.Event())
        clients = [http_client(processes.config, timeout_s=WAIT_S) for _ in range(8)]
        reading = [asyncio.create_task(read_stream(client)) for client in clients]
        await until(lambda: len(decode.live) == 8, timeout_s=WAIT_S)
        process.send_signal(signal.SIGTERM)
        assert decode.behaviour.step is not None
        decode.behaviour.step.set()
        assert [events[-1] for events in await asyncio.gather(*reading)] == ["[DONE]"] * 8
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
        await asyncio.gather(*(client.aclose() for client in clients))
        used = [json.loads(line) for line in (tmp_path / "usage.jsonl").read_text().splitlines()]
        assert len({line["request"] for line in used}) == 49


async def test_processes_whose_parent_is_killed_finish_and_leave_their_ports_to_those_of_the_next(
    processes: Processes,
) -> None:
    decode = FakeDecode()
    async with registered(processes.config, [decode]):
        first = await processes.start()
        await processes.until_all_are_ready()
        orphans = psutil.Process(first.pid).children()
        kept = [http_client(processes.config, timeout_s=WAIT_S) for _ in range(4)]
        for client in kept:
            assert (await client.post("/v1/completions", json=body())).is_success
        decode.behaviour = Behaviour(step=asyncio.Event())
        clients = [http_client(processes.config, timeout_s=WAIT_S) for _ in range(8)]
        reading = [asyncio.create_task(read_stream(client)) for client in clients]
        await until(lambda: len(decode.live) == 8, timeout_s=WAIT_S)
        first.kill()
        await first.wait()
        second = await processes.start()
        await until(lambda: processes.log.count("router is listening") == 4, timeout_s=WAIT_S)
        await processes.until_all_are_ready()
        assert all(orphan.is_running() for orphan in orphans), "their streams go on"
        step, decode.behaviour = decode.behaviour.step, Behaviour()
        for client in kept:  # whose connections are those of orphans
            await client.post("/v1/completions", json=body())
            assert (await client.post("/v1/completions", json=body())).is_success
        assert step is not None
        step.set()
        assert [events[-1] for events in await asyncio.gather(*reading)] == ["[DONE]"] * 8
        await asyncio.gather(*(client.aclose() for client in [*clients, *kept]))
        await until(lambda: not any(orphan.is_running() for orphan in orphans), timeout_s=WAIT_S)
        second.terminate()
        assert await second.wait() == 0


def _requests(page: str) -> int:
    counts = re.findall(r"^whalepod_requests_total\{.*\} (\S+)$", page, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


async def test_a_process_that_hangs_is_replaced(processes: Processes) -> None:
    async with registered(processes.config, [FakeDecode()]):
        process = await processes.start()
        await processes.until_all_are_ready()
        victim, other = psutil.Process(process.pid).children()
        victim.suspend()
        await until(lambda: not psutil.pid_exists(victim.pid), timeout_s=HUNG_AFTER_S + 15)
        await processes.until_all_are_ready()
        assert other in psutil.Process(process.pid).children()
        await asyncio.gather(*(processes.ask() for _ in range(10)))
