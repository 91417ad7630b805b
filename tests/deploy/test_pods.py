"""What the chart renders is started, as processes: probes, answers, a pool that shares its experts over several pods,
memory, and the way out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.pods import Node, Pod
from tests.deploy.rendering import EXAMPLES, merged, of_kind, pod_templates, render
from whalepod.core.clock import Deadline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORTS = {"http": 28000, "grpc": 28001, "admin": 28002}
VALUES = merged(
    EXAMPLES["laptop"],
    {
        "router": {"ports": PORTS},
        "prefill": {"port": 28100},
        "decode": {"port": 28200, "replicas": 2},
        "kv": {"port": 28400},
        "redis": {"port": 28500},
        "settings": {"decode": {"expert_parallel": True}, "engine": {"context_tokens_max": 1024}},
    },
)
ADDRESSES = {"redis": "127.0.5.1", "router": "127.0.3.1", "kv": "127.0.4.1", "prefill": "127.0.2.1"}
REDIS_NAME = "demo-whalepod-redis-0.demo-whalepod-redis.serving.svc.cluster.local"
ADMIN_NAME = "demo-whalepod-admin:"


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    manifests = render(VALUES)
    templates = {template.role: template for template in pod_templates(manifests)}
    node = Node(manifests, tmp_path_factory.mktemp("pods"), {REDIS_NAME: ADDRESSES["redis"]})
    node.write_files(rank_host="127.0.1.{index}")
    started: dict[str, Pod] = {}
    try:
        for role, address in ADDRESSES.items():
            started[role] = Pod.start(node, templates[role], address=address)
        for index in range(2):
            started[f"decode-{index}"] = Pod.start(node, templates["decode"], address=f"127.0.1.{index}", index=index)
        deadline = Deadline.after(150)
        while not all(pod.passes("readinessProbe") for pod in started.values()):
            for pod in started.values():
                assert pod.process.poll() is None, f"{pod.name}: {pod.log.read_text()[-3000:]}"
            assert not deadline.expired, {name: pod.passes("readinessProbe") for name, pod in started.items()}
        yield started
    finally:
        for pod in started.values():
            pod.end()


def answer(pods: dict[str, Pod]) -> httpx.Response:
    body = {"model": "whalepod-tiny", "prompt": "Whales are large animals that", "max_tokens": 8, "temperature": 0}
    url = f"http://{pods['router'].address}:{PORTS['http']}/v1/completions"
    return httpx.post(url, json=body, timeout=60, trust_env=False)


def admin_page(router: str) -> str:
    return httpx.get(f"http://{router}:{PORTS['admin']}/metrics", trust_env=False).text


def test_pods_pass_their_probes_answer_and_fit_into_their_memory(pods: dict[str, Pod]) -> None:
    response = answer(pods)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 8
    for pod in pods.values():
        assert pod.name == "redis-0" or pod.passes("startupProbe")
        assert pod.passes("livenessProbe"), pod.name
        assert pod.memory_share < 0.9, f"{pod.name} takes {pod.memory_share:.0%} of its memory"


def test_operators_pages_are_on_the_admin_port_alone(pods: dict[str, Pod]) -> None:
    router = pods["router"].address
    assert httpx.get(f"http://{router}:{PORTS['http']}/metrics", trust_env=False).status_code == 404
    deadline = Deadline.after(10)  # a rank that has just become ready is in the registry within a second
    while 'whalepod_router_ranks{role="decode"} 2.0' not in (page := admin_page(router)):
        assert not deadline.expired, page


def test_the_helm_test_passes(pods: dict[str, Pod]) -> None:
    (pod,) = of_kind(render(VALUES), "Pod")
    container = pod["spec"]["containers"][0]
    words = [word.replace(ADMIN_NAME, f"{pods['router'].address}:") for word in container["args"]]
    done = subprocess.run(
        [sys.executable, *container["command"][1:], *words], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"status":"ready"' in done.stdout.replace(" ", "")


def test_pods_drain_and_end_well_one_after_another_and_the_last_ranks_answer(pods: dict[str, Pod]) -> None:
    assert pods["decode-1"].terminate() == 0
    assert answer(pods).status_code == 200, "decode-0 has the experts of both now"
    for name in ("router", "prefill", "decode-0", "kv"):
        assert pods[name].terminate() == 0, pods[name].log.read_text()[-3000:]
