"""A served cluster with vision ranks: what one process says, and what becomes of requests when one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.e2e.test_images import messages, truth
from tests.model.vision.pictures import encoded, noise
from whalepod import LLM
from whalepod.cluster.config import METRICS_PORT_OFFSET
from whalepod.core.clock import Deadline
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PORT = 26_300


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_tiny_checkpoint(directory)
    llm = LLM(directory, context_tokens_max=1024)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    flags = ("--vision-replicas", "2", "--vision-port", str(PORT), "--vision-timeout-seconds", "10")
    directory = tmp_path_factory.mktemp("serve")
    with served_cluster(directory, "--log-level", "warning", *flags) as cluster:
        yield cluster


def ask(cluster: ServedCluster, asked: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"messages": asked, "thinking": {"type": "disabled"}, "temperature": 0, "max_tokens": 12}
    extras = {"fidelity": "exact", "return_token_ids": True, "ignore_eos": True, **fields}
    with cluster.client() as client:
        return client.post("/v1/chat/completions", json=body | extras, timeout=120.0)


def ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def encoded_images() -> float:
    """By the vision ranks that live."""
    total = 0.0
    for index in range(2):
        page = httpx.get(f"http://127.0.0.1:{PORT + index + METRICS_PORT_OFFSET}/metrics", trust_env=False).text
        for line in page.splitlines():
            if line.startswith('whalepod_vision_images_total{source="encoded"}'):
                total += float(line.split()[-1])
    return total


def test_a_conversation_is_what_one_process_says_and_each_image_is_encoded_once(
    seeing: ServedCluster, oracle: LLM
) -> None:
    asked = messages(*(encoded(noise(120, 90, seed=seed)) for seed in (1, 2, 1)))
    before = encoded_images()
    assert ids(ask(seeing, asked)) == truth(oracle, asked)
    assert encoded_images() - before == 2, "the same image twice is one"
    assert ids(ask(seeing, asked)) == truth(oracle, asked)
    assert encoded_images() - before == 2


def test_a_vision_rank_killed_in_mid_request_is_made_up_for(seeing: ServedCluster, oracle: LLM) -> None:
    prompts = [messages(encoded(noise(700, 500, seed=100 + seed))) for seed in range(6)]
    wanted = [truth(oracle, asked) for asked in prompts]
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask, seeing, asked) for asked in prompts]
        victim = seeing.pid_on_port(PORT)
        os.kill(victim, signal.SIGKILL)
        assert [ids(one.result(120)) for one in waiting] == wanted
    until_back(seeing, victim)


def test_without_a_vision_rank_images_end_with_the_truth_and_text_goes_on(seeing: ServedCluster) -> None:
    victims = [seeing.pid_on_port(PORT + index) for index in range(2)]
    asked = messages(encoded(noise(120, 90, seed=999)))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    answer = ask(seeing, asked)
    assert answer.status_code in (200, 502, 503), answer.text
    if answer.status_code != 200:
        assert "vision rank" in answer.json()["error"]["message"]
    assert ids(ask(seeing, [{"role": "user", "content": "Only text."}]))
    for index, victim in enumerate(victims):
        until_back(seeing, victim, index=index)
    deadline = Deadline.after(30)
    while ask(seeing, asked).status_code != 200:
        assert not deadline.expired


def until_back(cluster: ServedCluster, victim: int, *, index: int = 0) -> None:
    """Ray starts the rank again."""
    deadline = Deadline.after(60)
    while cluster.try_pid_on_port(PORT + index) in (None, victim):
        assert not deadline.expired, "the vision rank did not come back"
