"""`make prom-test`: a real Prometheus scrapes a served cluster, and every rule and panel finds its series there.

Needs `prometheus` and `promtool` on the path (Debian's package). Prints what is missing, and last one JSON object:
series_missing (names that no process tells), expressions, empty (that had no value: faults that did not happen),
label_values_max (of one label, after 10,000 requests with random values in everything that a client can choose).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from rich.console import Console

from tests.cluster.conftest import free_port
from tests.deploy.grafana import DASHBOARDS, queries
from tests.deploy.prometheus_rules import ALERTS, RECORDED, rules_text
from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_images import messages
from tests.model.vision.pictures import encoded, noise
from whalepod.cluster.config import METRICS_PORT_OFFSET
from whalepod.core.clock import Deadline

RULES_TEST = Path(__file__).with_name("rules_test.yaml")
RANDOM_REQUESTS = 10_000
AT_A_TIME = 32


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def ask(self, page: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{page}", params=parameters, timeout=30, trust_env=False)
        answer.raise_for_status()
        return answer.json()["data"]

    def has_value(self, expression: str) -> bool:
        return bool(self.ask("query", query=expression)["result"])


def promtool(*words: str, cwd: Path) -> str:
    """What it says. Raises CalledProcessError where it finds something wrong."""
    command = [_program("promtool"), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=120).stdout


def check_rules(directory: Path) -> None:
    """Syntax of the rules, and their unit tests. Raises CalledProcessError."""
    (directory / "rules.yaml").write_text(rules_text(), encoding="utf-8")
    shutil.copy(RULES_TEST, directory)
    promtool("check", "rules", "rules.yaml", cwd=directory)
    promtool("test", "rules", RULES_TEST.name, cwd=directory)


@contextmanager
def running_prometheus(directory: Path, targets: dict[str, str]) -> Generator[Prometheus]:
    """`targets`: address → pool; empty: a router or something else without one."""
    jobs = [
        {"job_name": f"whalepod-{pool or 'router'}-{index}", "static_configs": [_group(address, pool)]}
        for index, (address, pool) in enumerate(targets.items())
    ]
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    text = yaml.safe_dump({"global": times, "rule_files": ["rules.yaml"], "scrape_configs": jobs})
    (directory / "prometheus.yaml").write_text(text, encoding="utf-8")
    port = free_port()
    words = [_program("prometheus"), "--config.file=prometheus.yaml", f"--storage.tsdb.path={directory / 'data'}"]
    words.append(f"--web.listen-address=127.0.0.1:{port}")
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=directory, stdout=log, stderr=log)
        try:
            server, deadline = Prometheus(f"http://127.0.0.1:{port}"), Deadline.after(30)
            while not _is_ready(server.url):
                assert process.poll() is None, (directory / "log").read_text()
                assert not deadline.expired
            yield server
        finally:
            process.terminate()
            process.wait(30)


def expressions() -> dict[str, str]:
    """Where each stands → what is asked, as Grafana would fill it in."""
    asked = {f"rule {name}": name for name in RECORDED}
    asked |= {f"alert {alert['alert']}": alert["expr"] for alert in ALERTS}
    for name in DASHBOARDS:
        asked |= {f"{name} {index}": query for index, query in enumerate(queries(name))}
    return {
        where: query.replace("$here", 'namespace=~".*",job=~".*"').replace("$__rate_interval", "1m")
        for where, query in asked.items()
    }


def series_missing(server: Prometheus) -> set[str]:
    """Names of our series in rules and panels that no scraped process tells, not even as an empty family."""
    families = set(server.ask("metadata", limit="10000"))
    named = {name for query in expressions().values() for name in re.findall(r"\bwhalepod_[a-z0-9_]+", query)}
    # Ranks answer in OpenMetrics, where a counter's family has no `_total`.
    return {name for name in named if not {name, re.sub(r"_(bucket|sum|count|total)$", "", name)} & families}


async def send_load(cluster: ServedCluster) -> None:
    """Prompts that share prefixes, streams, images, an unfinished one: what moves most numbers."""
    prompt = "The whale sings in the deep water of the north. " * 24
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        for round_number in range(3):
            bodies = [
                {"prompt": f"{prompt}{n}", "max_tokens": 24, "temperature": 0, "ignore_eos": True} for n in range(4)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            assert all(answer.is_success for answer in answers), [answer.text for answer in answers]
            picture = messages(encoded(noise(96, 64, seed=round_number)))
            chat = {"messages": picture, "thinking": {"type": "disabled"}, "max_tokens": 4}
            answer = await client.post("/v1/chat/completions", json=chat)
            assert answer.is_success, answer.text


async def send_random_values(cluster: ServedCluster, count: int = RANDOM_REQUESTS) -> None:
    """Requests with a new value in everything that a client can choose. Most are refused, which is counted too."""
    random, gate = Random(7), asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as client:

        async def send(number: int) -> None:
            value = f"v{random.getrandbits(64):x}"
            headers = {"x-request-id": value, "x-tenant-id": value, "x-session-id": value, "user-agent": value}
            body = {"model": value, "prompt": value, "user": value, "cache_salt": value, value: value}
            path = "/v1/completions" if number % 2 else f"/{value}"
            async with gate:
                await client.post(path, json=body, headers=headers)

        await asyncio.gather(*(send(number) for number in range(count)))


def label_values_max(server: Prometheus) -> int:
    """The most values that one label of our series has."""
    series = server.ask("series", **{"match[]": '{__name__=~"whalepod_.*"}'})
    values: dict[str, set[str]] = {}
    for labels in series:
        for name, value in labels.items():
            if name not in ("__name__", "le"):
                values.setdefault(name, set()).add(value)
    return max(map(len, values.values()))


def targets_of(cluster: ServedCluster, vision_port: int, canary_port: int, kv_port: int) -> dict[str, str]:
    config = cluster.config
    targets = {f"127.0.0.1:{config.router.http_port}": "", f"127.0.0.1:{canary_port}": ""}
    targets[f"127.0.0.1:{kv_port + METRICS_PORT_OFFSET}"] = ""
    first = {"prefill": config.prefill.port, "decode": config.decode.port}
    ports = {name: [port, port + 1] for name, port in first.items()} | {"vision": [vision_port]}
    return targets | {
        f"127.0.0.1:{port + METRICS_PORT_OFFSET}": pool for pool, listed in ports.items() for port in listed
    }


def running_canary(cluster: ServedCluster, port: int) -> AbstractContextManager[None]:
    words = ["canary", "--every", "600", "--requests", "2"]
    return running(cluster, [*words, "--http-port", str(cluster.config.router.http_port), "--metrics-port", str(port)])


def running_kv_service(cluster: ServedCluster, port: int) -> AbstractContextManager[None]:
    words = ["kv", "serve", "--kv-port", str(port), "--redis-port", str(cluster.config.redis_port)]
    return running(cluster, [*words, "--log-level", "warning"])


@contextmanager
def running(cluster: ServedCluster, words: list[str]) -> Generator[None]:
    """A `whalepod` command beside the cluster, until the block ends."""
    command = [sys.executable, "-m", "whalepod", *words]
    process = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def figures(directory: Path, console: Console) -> dict[str, int]:
    """Raises CalledProcessError on rules that promtool refuses."""
    check_rules(directory)
    flags = ["--decode-replicas", "2", "--decode-expert-parallel", "--vision-replicas", "1"]
    flags += ["--prefill-context-parallel", "2", "--prefill-context-parallel-rows-min", "16"]
    vision_port, kv_port, canary_port = 24_900, 24_950, free_port()
    flags += ["--vision-port", str(vision_port), "--log-level", "warning"]
    with (
        served_cluster(directory, *flags, prefill_ranks=2) as cluster,
        running_canary(cluster, canary_port),
        running_kv_service(cluster, kv_port),
        running_prometheus(directory, targets_of(cluster, vision_port, canary_port, kv_port)) as server,
    ):
        asyncio.run(send_load(cluster))
        _wait_for(server, "whalepod_canary_rounds_total and on () whalepod:completion_tokens:rate5m > 0")
        asyncio.run(send_load(cluster))
        _wait_for(server, "sum(rate(whalepod_completion_tokens_total[1m])) > 0")
        missing = series_missing(server)
        asked = expressions()
        empty = [
            where for where, query in asked.items() if not server.has_value(query) and not where.startswith("alert")
        ]
        for line in [*sorted(missing), *(f"no value: {where}: {asked[where]}" for where in empty)]:
            console.print(line)
        asyncio.run(send_random_values(cluster))
        _wait_for(server, 'sum(whalepod_requests_total{outcome="model_not_found"}) > 100')
        most = label_values_max(server)
    return {"series_missing": len(missing), "expressions": len(asked), "empty": len(empty), "label_values_max": most}


def main() -> None:
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as directory:
        found = figures(Path(directory), console)
    console.print(json.dumps(found))
    sys.exit(bool(found["series_missing"]))


def _group(address: str, pool: str) -> dict[str, Any]:
    return {"targets": [address], **({"labels": {"pool": pool}} if pool else {})}


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; on Debian or Ubuntu: apt-get install prometheus")
    return found


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _wait_for(server: Prometheus, expression: str) -> None:
    deadline = Deadline.after(90)
    while not server.has_value(expression):
        assert not deadline.expired, expression


if __name__ == "__main__":
    main()
