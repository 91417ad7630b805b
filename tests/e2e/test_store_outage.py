"""A store that stops answering, or dies, under load: most of the goodput stays, prefill ranks stay in use, hits come
back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.e2e.served_cluster import ServedCluster
from whalepod.core.clock import Deadline
from whalepod.core.ids import mint_nonce

pytestmark = [pytest.mark.slow, pytest.mark.alone]

PROMPT = "The whale swam on, and the sea was quiet about it. " * 12
WINDOW_S = 20.0
OUTAGE_S = 60.0
CLIENTS = 3
GOODPUT_MIN = 0.7


def complete(cluster: ServedCluster, salt: str) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "fidelity": "exact", "cache_salt": salt}
    with cluster.client() as client:
        return client.post("/v1/completions", json=body, timeout=45)


def goodput(cluster: ServedCluster, truth: str, *, seconds: float = WINDOW_S) -> float:
    """New prompts completed rightly, a second, by a few clients."""
    deadline = Deadline.after(seconds)
    done: list[int] = []
    wrong: list[str] = []

    def work() -> None:
        while not deadline.expired:
            response = complete(cluster, mint_nonce().hex())
            if response.status_code == 200 and response.json()["choices"][0]["text"] == truth:
                done.append(1)
            else:
                wrong.append(response.text)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    return len(done) / seconds


def handed_off(cluster: ServedCluster) -> float:
    with cluster.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = 'whalepod_router_handoffs_total{outcome="handed_off"}'
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


def hits(cluster: ServedCluster) -> bool:
    usage = complete(cluster, "truth").json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] > 0


def until(condition: Callable[[], bool], *, within_s: float) -> bool:
    deadline = Deadline.after(within_s)
    while not deadline.expired:
        if condition():
            return True
    return False


@pytest.mark.timeout(240)
def test_f4_a_frozen_store_costs_little_goodput_and_no_request(cluster: ServedCluster) -> None:
    truth = complete(cluster, "truth").json()["choices"][0]["text"]
    before = goodput(cluster, truth)
    redis = psutil.Process(cluster.pid_on_port(cluster.config.redis_port))
    handed_before = handed_off(cluster)
    redis.suspend()
    try:
        during = goodput(cluster, truth)
        assert handed_off(cluster) > handed_before, "prefill ranks are still used"
    finally:
        redis.resume()
    assert during >= GOODPUT_MIN * before, (before, during)

    assert until(lambda: hits(cluster), within_s=20)


@pytest.mark.timeout(300)
def test_f2_f4_a_dead_store_costs_little_goodput_and_no_request(cluster: ServedCluster) -> None:
    truth = complete(cluster, "truth").json()["choices"][0]["text"]
    before = goodput(cluster, truth)
    handed_before = handed_off(cluster)
    alive_again = threading.Event()

    def keep_dead() -> None:
        """The supervisor starts it again, and again."""
        while not alive_again.wait(0.2):
            pid = cluster.try_pid_on_port(cluster.config.redis_port)
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid is not None:
                    psutil.Process(pid).kill()

    killer = threading.Thread(target=keep_dead)
    killer.start()
    try:
        during = goodput(cluster, truth, seconds=OUTAGE_S)
        assert handed_off(cluster) > handed_before, "prefill ranks are still used"
    finally:
        alive_again.set()
        killer.join()
    assert during >= GOODPUT_MIN * before, (before, during)
    assert until(lambda: hits(cluster), within_s=60)
