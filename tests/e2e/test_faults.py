"""Processes killed at the worst moments: right answers, or the truth in time, and never a hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster
from whalepod.core.clock import Deadline
from whalepod.core.ids import mint_request_id

pytestmark = pytest.mark.slow

LONG_PROMPT = "The whale swam on, and the sea was quiet about it. " * 60
TRUTHFUL = {502, 503, 504}
DEADLINE_S = 45.0
HEADLESS_S = 20.0


def ask(cluster: ServedCluster, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "fidelity": "exact", **fields}
    with cluster.client() as client:
        return client.post("/v1/completions", json=body, timeout=DEADLINE_S)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def cached_tokens(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until_whole(cluster: ServedCluster, *, without_pid: int = 0) -> None:
    """Until every pool serves again, and nobody with this process id."""
    ports = (cluster.config.prefill.port, cluster.config.decode.port)
    deadline = Deadline.after(60)
    while without_pid in (pids := [cluster.try_pid_on_port(port) for port in ports]) or None in pids:
        assert not deadline.expired, pids
    with cluster.client() as client:
        while client.get("/readyz").status_code != 200:
            assert not deadline.expired


def pieces(response: httpx.Response) -> Iterator[str]:
    """Texts of a streamed completion. Fails on an error event or a missing end."""
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            yield from (choice["text"] for choice in chunk["choices"])
    raise AssertionError("the stream broke off")


def test_f2_redis_killed_in_mid_stream_costs_hits_and_no_token_and_comes_back(cluster: ServedCluster) -> None:
    salt = mint_request_id().hex()
    fields = {"max_tokens": 40, "ignore_eos": True, "cache_salt": salt}
    truth = text_of(ask(cluster, LONG_PROMPT, **fields))
    body = {"prompt": LONG_PROMPT, "temperature": 0, "fidelity": "exact", "stream": True, **fields}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        streamed = pieces(response)
        text = next(streamed)
        killed = cluster.kill_on_port(cluster.config.redis_port)
        text += "".join(streamed)
    assert text == truth
    assert text_of(ask(cluster, LONG_PROMPT, **fields)) == truth
    deadline = Deadline.after(30)
    hit = 0
    while not hit and not deadline.expired:
        hit = cached_tokens(ask(cluster, LONG_PROMPT, **fields))
    assert hit > 0
    assert cluster.pid_on_port(cluster.config.redis_port) != killed


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_rank_killed_before_it_answers_is_made_up_for_or_told(cluster: ServedCluster, pool: str) -> None:
    wait_until_whole(cluster)
    truth = text_of(ask(cluster, LONG_PROMPT, cache_salt=mint_request_id().hex()))
    port = {"prefill": cluster.config.prefill.port, "decode": cluster.config.decode.port}[pool]
    pid = cluster.pid_on_port(port)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(cluster, LONG_PROMPT, cache_salt=mint_request_id().hex()))
    )
    asking.start()
    psutil.Process(pid).cpu_percent()
    deadline = Deadline.after(10)
    while psutil.Process(pid).cpu_percent(interval=0.05) < 20 and not deadline.expired:
        pass  # until it computes
    psutil.Process(pid).kill()
    asking.join(DEADLINE_S + 5)
    assert not asking.is_alive(), "a hang"
    assert answers[0].status_code in {200, *TRUTHFUL}, answers[0].text
    if answers[0].status_code == 200:
        assert text_of(answers[0]) == truth
    wait_until_whole(cluster, without_pid=pid)
    assert text_of(ask(cluster, LONG_PROMPT, cache_salt=mint_request_id().hex())) == truth


def test_ranks_get_as_much_time_as_whoever_started_them(cluster: ServedCluster) -> None:
    wait_until_whole(cluster)
    ports = (cluster.config.prefill.port, cluster.config.decode.port)
    niceness = psutil.Process(cluster.process.pid).nice()
    assert [psutil.Process(cluster.pid_on_port(port)).nice() for port in ports] == [niceness] * 2


def test_fault_f13_requests_go_on_without_the_ray_head(cluster: ServedCluster) -> None:
    wait_until_whole(cluster)
    truth = text_of(ask(cluster, LONG_PROMPT, cache_salt=mint_request_id().hex()))
    (head,) = (process for process in cluster.descendants() if process.name() == "gcs_server")
    head.kill()
    deadline = Deadline.after(HEADLESS_S)
    while not deadline.expired:
        assert text_of(ask(cluster, LONG_PROMPT, cache_salt=mint_request_id().hex())) == truth
    assert cluster.process.poll() is None
